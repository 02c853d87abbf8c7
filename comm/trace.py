"""A process's states over time, one after the other, and a few counters, in `trace/<name>.jsonl` of the run folder.

The first line relates this process's clock to the wall clock, so that the files of all hosts fit on one axis.
"""

import json
import os
import time
from pathlib import Path

from .clock import Clock
from .disk import is_full


class Trace:
    """One state at a time. A line is written when a state ends: {"state", "t", "d" (seconds of the clock), facts}."""

    def __init__(self, run_dir: Path, name: str, clock: Clock) -> None:
        folder = run_dir / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._clock = clock
        self._state = ""
        self._facts: dict[str, float | int | str] = {}
        self._since = clock.now()
        self._write({"process": name, "clock": self._since, "wall": time.time(), "speed": clock.speed})

    def enter(self, state: str, **facts: float | str) -> None:
        """Change to a state; does nothing if the process is in it already, with the same facts."""
        if state == self._state and facts == self._facts:
            return
        self._end_state()
        self._state, self._facts = state, facts

    def now(self) -> float:
        return self._clock.now()

    def span(self, state: str, since: float, **facts: float | str) -> None:
        """Write an activity in parallel to the states, from `since` until now."""
        self._write({"state": state, "t": since, "d": self.now() - since, "lane": 1, **facts})

    def counters(self, **values: float) -> None:
        self._write({"t": self._clock.now(), "values": values})

    def close(self) -> None:
        """Write the last state."""
        self._end_state()
        os.close(self._descriptor)

    def _end_state(self) -> None:
        now = self._clock.now()
        if self._state:
            self._write({"state": self._state, "t": self._since, "d": now - self._since, **self._facts})
        self._since = now

    def _write(self, line: dict[str, object]) -> None:
        """A line that does not fit on the disk is left out: training does not wait for a trace."""
        try:
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        except OSError as error:
            if not is_full(error):
                raise
