"""The hub's journal: every decision as one JSON line, written before it takes effect.

`python -m headrace.relay.journal RUN` replays a run's journal, checks every line against the rules of `relay.state`, and
prints the account.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..comm.errors import HeadraceError
from .events import Checkpointed, Event, Trained, decode_event
from .state import HubState, apply


class JournalError(HeadraceError):
    """A journal line is not an event, or not a legal one; the message names file and line."""


class Journal:
    """Append-only file of events. `append` returns after the line was handed to the operating system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._encoder = msgspec.json.Encoder()

    def append(self, event: Event) -> None:
        os.write(self._fd, self._encoder.encode(event) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def stamped(event: Event) -> Event:
    """The event with the time of day."""
    return msgspec.structs.replace(event, t=round(time.time(), 3))


def read_events(path: Path) -> Iterator[tuple[int, Event]]:
    """(line number, event) of a journal. A last line without an end (the writer died in it) is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield number, decode_event(line)
            except msgspec.DecodeError as error:
                raise JournalError(f"{path}:{number}: {error}") from error


def replay(path: Path) -> HubState:
    """The state after all events of a journal. Raises `JournalError` at the first line that is not legal.

    The account is checked after each trained step and at the end: summing it up costs as much as the queue is long.
    """
    state, number = HubState(), 0
    for number, event in read_events(path):
        try:
            apply(event, state)
        except (AssertionError, KeyError) as error:
            raise JournalError(f"{path}:{number}: {error}") from error
        if isinstance(event, Trained) and not state.holds:
            break
    if not state.holds:
        raise JournalError(f"{path}:{number}: the account does not add up: {account_of(state)}")
    return state


def cut_after_checkpoint(path: Path, step: int) -> None:
    """End the journal with its checkpoint of `step`; the rest moves to `<name>.discarded-<n>` beside it.

    Raises `JournalError` if it has no such checkpoint.
    """
    found = [n for n, event in read_events(path) if isinstance(event, Checkpointed) and event.step == step]
    if not found:
        raise JournalError(f"{path} has no checkpoint of step {step}")
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > found[-1]:
        spare = 1 + len(list(path.parent.glob(f"{path.name}.discarded-*")))
        path.with_name(f"{path.name}.discarded-{spare}").write_bytes(b"".join(lines[found[-1] :]))
        kept = path.with_name(f"{path.name}.kept")
        kept.write_bytes(b"".join(lines[: found[-1]]))
        kept.replace(path)


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


def main(arguments: list[str]) -> int:
    """Print the account of the run folders named; 1 if one of their journals does not verify."""
    if not arguments:
        print("usage: python -m headrace.relay.journal RUN...", file=sys.stderr)
        return 2
    for run in arguments:
        path = Path(run) / "journal.jsonl"
        try:
            state = replay(path)
        except (JournalError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        account = " ".join(f"{name}={value}" for name, value in account_of(state).items())
        print(f"{run}: {state.step} steps, version {state.version}, {state.ended or 'not ended'}: {account}")
        print(f"  staleness {dict(sorted(state.staleness.items()))}")
        print(f"  versions per trajectory {dict(sorted(state.versions_per_trajectory.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
