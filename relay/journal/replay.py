"""From the lines of a journal to the state of its hub: the whole history for an audit, its end for the next hub."""

import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import msgspec

from .events import Event, decode_events
from .files import JournalError, check_order, line_name, read_blocks, read_events
from .hub_state import HubState, account_dict
from .snapshots import no_collections, snapshots_of
from .state import apply

_log = logging.getLogger(__name__)


@no_collections()
def replay(journal: Path, note: Callable[[Event], None] | None = None) -> HubState:
    """The state after all events of a journal; `note` is called with each event. Raises `JournalError` at an illegal line.

    The snapshots must be the states at their places, and each file must follow the one before it. The account is checked after each
    megabyte, since its cost grows with the length of the queue.
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
    journal: Path, state: HubState, start: int, end: int | None = None, note: Callable[[Event], None] | None = None
) -> None:
    """Apply the events between two places of the history."""
    for place, lines in read_blocks(journal, start, end):
        number = 0
        try:
            for number, event in enumerate(_decoded(journal, place, lines)):  # noqa: B007 - the message has it
                apply(event, state)
                if note is not None:
                    note(event)
        except (AssertionError, KeyError, IndexError) as error:
            line_start = sum(len(line) + 1 for line in lines.split(b"\n")[:number])
            raise JournalError(f"{line_name(journal, place + line_start)}: {error}") from error
        if not state.is_balanced:
            before = line_name(journal, place + len(lines))
            raise JournalError(f"{before}: the account of the lines before does not add up: {account_dict(state)}")


def _decoded(journal: Path, place: int, lines: bytes) -> list[Event]:
    """The events of a block of lines. The error names a line that is not an event."""
    try:
        return decode_events(lines)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [event for _, event in read_events(journal, place, place + len(lines))]
