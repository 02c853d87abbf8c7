"""The collectives that the ranks of a task share, as protocols; `SingleRank` implements them for one rank."""

from collections.abc import Sequence
from typing import Protocol

from ...comm.messages.base import Message


class ThreadTeam(Protocol):
    """The ranks of a task, for the collectives of their streams' threads. Rank 0 talks to the hub."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message, on all ranks."""
        ...

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it."""
        ...


class CallerTeam(Protocol):
    """The same ranks, for the collectives of the streams' callers, in a group of their own."""

    @property
    def rank(self) -> int: ...

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks."""
        ...


class SingleRank:
    """Both teams, for a single rank."""

    rank = 0
    size = 1

    def broadcast(self, message: Message | None) -> Message:
        assert message is not None
        return message

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return values
