"""The journal of a run in progress, read as it grows, and the times of recovery after a fault, by its events."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headrace.relay.journal import events as ev

_OF_DEATH = ("incarnation", "was ended by", "ended with")
"""Words of the reasons for which the leases of a dead rollout are back: by the fleet, by its supervisor."""


class JournalTail:
    """Reads the events that a journal gained since the last call. A resumed run cuts its journal: it is read again then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.units: set[str] = set()
        """Storage units of the ready rows since the hub was opened."""
        self.steps = 0
        """Optimizer steps so far; those that a resumed run repeats count again."""

    def read(self) -> list[ev.Event]:
        """The new events; a line that is still being written waits for the next call."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        events: list[ev.Event] = []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            try:
                events.append(ev.decode_event(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # the audit at the end names it
        self.steps += sum(isinstance(event, ev.Trained) for event in events)
        return events

    def remember_units(self, events: Iterable[ev.Event]) -> None:
        """Note the units of ready rows, so that a later unit is known as new. A resumed run names them as before again."""
        for event in events:
            match event:
                case ev.Opened():
                    self.units.clear()
                case ev.RowReady(units=units):
                    self.units.update(units)
                case _:
                    pass


def recovery_times(target: str, since: float, events: Iterable[ev.Event], units: Iterable[str]) -> dict[str, float]:
    """Seconds from a fault of `target` at `since` (wall clock) until what its role does is done again, by name.

    A dead rollout's leases are back (`failover`) and its next process has weights (`restart`); rows are ready in a unit
    of the relay that is not one of `units`; the hub is open; the trainer has joined again (`restart`) and trained its next step,
    and rows are ready meanwhile. `next-step` is the next step of any run. A step of a dead trainer that the hub hears of late
    does not count for the next one.
    """
    known, times = set(units), dict[str, float]()
    name = target.removeprefix("host of ").removeprefix("supervisor of ")
    role = name.partition("-")[0]
    for event in events:
        seconds = event.t - since
        if seconds < 0:
            continue
        match event:
            case ev.Returned(reason=reason) if role == "rollout" and any(word in reason for word in _OF_DEATH):
                times.setdefault("rollout-failover", seconds)
            case ev.Received(holder=holder) if holder == target:
                times.setdefault("rollout-restart", seconds)
            case ev.RowReady(units=found) if any(unit.startswith(f"{name}#") for unit in {*found} - known):
                times.setdefault("relay-restart", seconds)
            case ev.RowReady() if role == "actor":
                times.setdefault("actor-next-row", seconds)
            case ev.Opened() | ev.HubRestarted() if role == "hub":
                times.setdefault("hub-restart", seconds)
            case ev.TrainerRestarted() if role == "actor":
                times.pop("actor-next-step", None)
                times.setdefault("actor-restart", seconds)
            case ev.Trained():
                times.setdefault(f"{role}-next-step", seconds)
            case _:
                pass
    return times


def is_back(target: str, times: Mapping[str, float]) -> bool:
    """Whether the next process of a killed target does its work, by the times of recovery so far."""
    role = target.partition("-")[0]
    return f"{role}-restart" in times and (role != "actor" or "actor-next-step" in times)


def named_times(times: Mapping[str, float], cold_start_s: float | None) -> dict[str, float]:
    """The times of recovery by the names of their rows; a restart of the trainer is shown beside the cold start of the run."""
    named = dict(times)
    if "actor-next-step" in times and cold_start_s is not None:
        named["cold-start-of-the-run"] = cold_start_s
    return named
