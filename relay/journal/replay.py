"""From the lines of a journal to the state of its hub: the whole history for an audit, its end for the next hub."""

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from operator import length_hint
from pathlib import Path

import msgspec

from .events import Event, decode_events
from .files import JournalError, check_order, line_name, read_blocks, read_events
from .hub_state import HubState, account_dict
from .snapshots import no_collections, snapshots_of
from .state import fold

_log = logging.getLogger(__name__)


@no_collections()
def replay(journal: Path, note: Callable[[Sequence[Event]], None] | None = None) -> HubState:
    """The state after all events of a journal; `note` is called with the events of each block. Raises `JournalError` at an illegal line.

    The snapshots must be the states at their places, and each file must follow the one before it. The account is checked
    after each megabyte, or once there are as many events as the queue has rows: the check looks at all of them.
    """
    state = HubState()
    place = 0
    for next_place, snapshot in sorted(snapshots_of(journal), key=lambda found: found[0]):
        _fold(journal, state, place, next_place, note)
        if state != snapshot:
            raise JournalError(f"{journal}: the snapshot after byte {next_place} is not the state of the events before")
        place = next_place
    _fold(journal, state, place, None, note)
    check_order(journal)
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


def _fold(
    journal: Path, state: HubState, start: int, end: int | None = None, note: Callable[[Sequence[Event]], None] | None = None
) -> None:
    """Apply the events between two places of the history."""
    num_unchecked = 0
    for place, lines in read_blocks(journal, start, end):
        events = _decoded(journal, place, lines)
        following = iter(events)
        try:
            fold(following, state)
        except (AssertionError, KeyError, IndexError) as error:
            number = len(events) - length_hint(following) - 1
            line_start = sum(len(line) + 1 for line in lines.split(b"\n")[:number])
            raise JournalError(f"{line_name(journal, place + line_start)}: {error}") from error
        if note is not None:
            note(events)
        num_unchecked += len(events)
        if num_unchecked >= state.samples_per_prompt * len(state.groups):
            _check_account(journal, state, place + len(lines))
            num_unchecked = 0
    if num_unchecked:
        _check_account(journal, state, place + len(lines))


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
