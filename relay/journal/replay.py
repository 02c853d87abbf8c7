"""From the lines of a journal to the state of its hub: the whole history for an audit, its end for the next hub."""

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from operator import length_hint
from pathlib import Path

import msgspec

from .events import Event, decode_events
from .files import JournalError, check_order, line_name, named_by_place, read_blocks, read_events
from .hub_state import HubState, account_dict
from .snapshots import no_collections, places_between, snapshots_of
from .state import fold

_log = logging.getLogger(__name__)


Note = Callable[[Sequence[Event]], None]
"""Is called with the events of each block."""


@no_collections()
def replay(journal: Path, note: Note | None = None) -> HubState:
    """The state after all events of a journal. Raises `JournalError` at an illegal line.

    The snapshots must be the states at their places, and each file must follow the one before it. The account is checked after each
    megabyte, or once there are as many events as the queue has rows: the check looks at all of them.
    """
    state = verify(journal, 0, None, note)
    check_order(journal)
    return state


def pieces_of(journal: Path) -> list[tuple[int, int | None]]:
    """The history in pieces that can be verified beside each other: the place where each begins and that where it ends, the last one None.

    At each place between two pieces there is a snapshot. The piece before proves it, and the piece after begins with it: so together
    they verify what `replay` does.
    """
    starts = [0, *places_between(journal)]
    return [*zip(starts, [*starts[1:], None], strict=True)]


@no_collections()
def verify(journal: Path, start: int, end: int | None, note: Note | None = None) -> HubState:
    """The state at the end of one of the pieces. Raises `JournalError` at an illegal line, or if a snapshot is not the state at its place."""
    places = [place for place in named_by_place(journal, "state") if place >= start and (end is None or place <= end)]
    found = snapshots_of(journal, places)
    state, place = HubState(), 0
    if start:
        place, state = next(found, (0, state))
    is_known = place == start
    for place, snapshot in found if is_known else ():
        _fold(journal, state, start, place, note)
        if state != snapshot:
            last = line_name(journal, place - 1)
            raise JournalError(
                f"{journal}: the snapshot after byte {place} is not the state of the events before, up to {last}"
            )
        start = place
    if not is_known or end not in (None, start):
        raise JournalError(f"{journal}: a snapshot that it had when the audit began is gone")
    if end is None:
        _fold(journal, state, start, None, note)
    return state


@no_collections()
def recover(journal: Path) -> HubState:
    """The same state, from the newest snapshot that counts and the events after it."""
    wrong: list[tuple[int, JournalError]] = []
    for place, state in chain(snapshots_of(journal), [(0, HubState())]):
        try:
            _fold(journal, state, place)
        except JournalError as error:
            if not place:
                raise  # the snapshots are not to blame
            wrong.append((place, error))
        else:
            for other, error in wrong:
                _log.warning("the snapshot after byte %d is not used: %s", other, error)
            return state
    raise AssertionError("the whole history is the last way")


def _fold(journal: Path, state: HubState, start: int, end: int | None = None, note: Note | None = None) -> None:
    """Apply the events between two places of the history."""
    place, num_unchecked = start, 0
    for begin, lines in read_blocks(journal, start, end):
        place = begin + len(lines)
        events = _decoded(journal, begin, lines)
        following = iter(events)
        try:
            fold(following, state)
        except (AssertionError, KeyError, IndexError) as error:
            number = len(events) - length_hint(following) - 1
            line_start = sum(len(line) + 1 for line in lines.split(b"\n")[:number])
            raise JournalError(f"{line_name(journal, begin + line_start)}: {error}") from error
        if note is not None:
            note(events)
        num_unchecked += len(events)
        if num_unchecked >= state.samples_per_prompt * len(state.groups):
            _check_account(journal, state, place)
            num_unchecked = 0
    _check_account(journal, state, place)


def _check_account(journal: Path, state: HubState, place: int) -> None:
    if not state.is_balanced:
        before = line_name(journal, place)
        raise JournalError(f"{before}: the account of the lines before does not add up: {account_dict(state)}")


def _decoded(journal: Path, place: int, lines: bytes) -> list[Event]:
    """The events of a block of lines. The error names a line that is not an event."""
    try:
        return decode_events(lines)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [event for _, event in read_events(journal, place, place + len(lines))]
