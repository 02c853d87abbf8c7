"""The hub's journal: every decision as one JSON line, written before it takes effect.

`python -m headrace.relay.journal RUN` replays a run's journal, checks every line against the rules of `relay.state`, and
prints the account.
"""

import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from ..comm.errors import HeadraceError
from .events import Checkpointed, Event, Leased, Returned, RowFailed, Trained, decode_event
from .snapshots import Prefix, end_of_last_line, snapshots, write_snapshot
from .state import HubState, apply

log = logging.getLogger(__name__)

SNAPSHOT_EVERY = 20_000
_MOST_REASONS = 10


class JournalError(HeadraceError):
    """A journal line is not an event, or not a legal one; the message names file and line."""


class Journal:
    """Append-only file of events. `append` returns after the line was handed to the operating system.

    A line that its writer died in is cut off when the journal is opened again, since what follows it could not be read.
    """

    def __init__(self, path: Path, snapshot_every: int = SNAPSHOT_EVERY) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, end_of_last_line(path))
        self._encoder = msgspec.json.Encoder()
        self._prefix = Prefix.of(path, os.fstat(self._fd).st_size)
        self._snapshot_every = snapshot_every
        self._next_snapshot = self._prefix.num_lines + snapshot_every

    def append(self, event: Event) -> None:
        """Write an event."""
        line = self._encoder.encode(event) + b"\n"
        os.write(self._fd, line)
        self._prefix.add(line)

    def settle(self, event: Event, state: HubState) -> None:
        """`state` has taken in `event`, the last one: keep a snapshot at checkpoints and every so many events."""
        if self._prefix.num_lines >= self._next_snapshot or isinstance(event, Checkpointed):
            write_snapshot(self.path, state, self._prefix)
            self._next_snapshot = self._prefix.num_lines + self._snapshot_every

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_events(path: Path, start: int = 0, first_number: int = 1) -> Iterator[tuple[int, Event]]:
    """(line number, event) of a journal from byte `start` on. A last line without an end (the writer died in it) is left out."""
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, first_number):
            if not line.endswith(b"\n"):
                return
            try:
                yield number, decode_event(line)
            except msgspec.DecodeError as error:
                raise JournalError(f"{path}:{number}: {error}") from error


def replay(path: Path) -> HubState:
    """The state after all events of a journal: its newest snapshot, and what came after. Raises `JournalError`.

    What lies before the snapshot is known by its digest; `verify` folds that as well.
    """
    for snapshot in snapshots(path):
        try:
            return _fold(path, snapshot.state, snapshot.num_bytes, snapshot.num_lines)
        except msgspec.DecodeError as error:
            log.warning("the snapshot of %s at line %d cannot be read: %s", path, snapshot.num_lines, error)
    return _fold(path, HubState())


def verify(path: Path, note: Callable[[Event], None] = lambda event: None) -> HubState:
    """The state after all events of a journal, folded from the first one; every snapshot must be what is met on the way.

    `note` is told each event. Raises `JournalError` at the first line that is not legal, or not what a snapshot says.
    """
    expected = {snapshot.num_lines: snapshot for snapshot in snapshots(path)}

    def compare(number: int, event: Event, state: HubState) -> None:
        note(event)
        if number in expected and expected[number].state != state:
            raise JournalError(f"{path}:{number}: the snapshot here tells another state")

    return _fold(path, HubState(), visit=compare)


def _fold(
    path: Path,
    state: HubState,
    num_bytes: int = 0,
    num_lines: int = 0,
    visit: Callable[[int, Event, HubState], None] = lambda number, event, state: None,
) -> HubState:
    """Apply what comes after the first `num_lines` lines and `num_bytes` bytes.

    The account is checked after each trained step and at the end: summing it up costs as much as the queue is long.
    """
    last = num_lines
    for number, event in read_events(path, num_bytes, num_lines + 1):
        last = number
        try:
            apply(event, state)
        except (AssertionError, KeyError) as error:
            raise JournalError(f"{path}:{number}: {error}") from error
        visit(number, event, state)
        if isinstance(event, Trained) and not state.holds:
            break
    if not state.holds:
        raise JournalError(f"{path}:{last}: the account does not add up: {account_of(state)}")
    return state


def cut_after_checkpoint(path: Path, step: int) -> None:
    """End the journal with its checkpoint of `step`; the rest moves to `<name>.discarded-<n>` beside it.

    Raises `JournalError` if it has no such checkpoint.
    """
    found = [n for n, event in read_events(path) if isinstance(event, Checkpointed) and event.step == step]
    if not found:
        raise JournalError(f"{path} has no checkpoint of step {step}")
    with path.open("rb") as file:
        kept_bytes = sum(len(line) for line in islice(file, found[-1]))
        if kept_bytes == path.stat().st_size:
            return
        spare = 1 + len(list(path.parent.glob(f"{path.name}.discarded-*")))
        file.seek(kept_bytes)
        with path.with_name(f"{path.name}.discarded-{spare}").open("wb") as rest:
            shutil.copyfileobj(file, rest)
    os.truncate(path, kept_bytes)


def account_of(state: HubState) -> dict[str, int | bool]:
    """The accounting identity of a state, as it is printed and saved."""
    a = state.account
    return {
        "leased": a.leased,
        "trained": a.trained,
        "evicted": a.evicted,
        "filtered": a.filtered,
        "failed": a.failed,
        "in_flight": state.in_flight,
        "holds": state.holds,
    }


class _Diary:
    """What a journal tells beside the state: how often what was decided, for whom and why. For reading."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.leased_to: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def note(self, event: Event) -> None:
        """One more event."""
        self.counts[type(event).__name__] += 1
        match event:
            case Leased(holder=holder, samples=samples):
                self.leased_to[holder] += len(samples)
            case RowFailed(reason=reason):
                self.reasons[f"failed: {reason}"] += 1
            case Returned(reason=reason):
                self.reasons[f"returned: {reason}"] += 1
            case _:
                pass

    def lines(self) -> Iterator[str]:
        """What is worth a line each."""
        yield f"events {dict(sorted(self.counts.items()))}"
        yield f"trajectories leased, again included, to {dict(sorted(self.leased_to.items()))}"
        for reason, count in self.reasons.most_common(_MOST_REASONS):
            yield f"{count} x {reason}"


def main(arguments: list[str]) -> int:
    """Print the account of the run folders named; 1 if one of their journals does not verify."""
    if not arguments:
        print("usage: python -m headrace.relay.journal RUN...", file=sys.stderr)
        return 2
    for run in arguments:
        path, diary = Path(run) / "journal.jsonl", _Diary()
        try:
            state = verify(path, diary.note)
        except (JournalError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        account = " ".join(f"{name}={value}" for name, value in account_of(state).items())
        print(f"{run}: {state.step} steps, version {state.version}, {state.ended or 'not ended'}: {account}")
        print(f"  staleness {dict(sorted(state.staleness.items()))}")
        print(f"  versions per trajectory {dict(sorted(state.versions_per_trajectory.items()))}")
        for text in diary.lines():
            print(f"  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
