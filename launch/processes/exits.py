"""What the exit of a supervisor's child means."""

from collections.abc import Sequence
from enum import Enum, auto

from ...comm.errors import MEMORY_FULL_EXIT, STORE_GONE_EXIT, STORE_LOST_EXIT

MAX_RESTARTS = 5
"""Restarts of a child within `RESTART_WINDOW_S` after which it counts as broken."""
RESTART_WINDOW_S = 60.0


class ExitKind(Enum):
    """The meaning of a child's exit."""

    DONE = auto()
    RESTART = auto()
    FAILED_REPORTED = auto()
    """The run fails, and the child has reported the reason to the hub."""
    FAILED_UNREPORTED = auto()
    """The run fails, and the hub does not know it yet."""


def classify_exit(
    role: str,
    code: int,
    restarts: Sequence[float],
    now: float,
    *,
    is_restartable: bool,
    is_ending: bool,
    has_store_ended: bool = True,
) -> ExitKind:
    """Classify the exit of a child of `role` with `code`. `restarts` holds the times of its earlier restarts.

    A process that lost a store that has not ended is started again: it was frozen for long, or the network may come back.
    """
    if code == 0:
        return ExitKind.DONE
    if is_ending or code == STORE_GONE_EXIT or (code == STORE_LOST_EXIT and has_store_ended):
        return ExitKind.FAILED_REPORTED
    if is_restartable and code != 2:
        recent = [moment for moment in restarts if now - moment < RESTART_WINDOW_S]
        return ExitKind.RESTART if len(recent) < MAX_RESTARTS else ExitKind.FAILED_UNREPORTED
    if code in (1, 2, MEMORY_FULL_EXIT) and role != "store":
        return ExitKind.FAILED_REPORTED
    return ExitKind.FAILED_UNREPORTED
