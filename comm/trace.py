"""A process's states over time, one after the other, and a few counters, in `trace/<name>.jsonl` of the run folder.

The first line relates this process's clock to the wall clock, so that the files of all hosts fit on one axis. The start of each
state is a failpoint too: a place where a bench of faults may let a process fail.
"""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from .clock import Clock
from .disk import is_unwritable, make_folders

FAILPOINTS = "HEADRACE_FAILPOINTS"
"""Path of the socket on which a fault test receives failpoints; the test listens only while it waits for one."""
_FAILPOINT_S = 30.0


def failpoint(point: str, **facts: float | str) -> None:
    """Announce that this process is at a point, and wait for the answer; nothing happens outside of a bench of faults."""
    address = os.environ.get(FAILPOINTS)
    if address is None or not os.path.exists(address):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_FAILPOINT_S)
        connection.connect(address)
        connection.sendall(json.dumps({"point": point, "pid": os.getpid(), **facts}).encode() + b"\n")
        connection.recv(1)


class Trace:
    """One state at a time. A line is written when a state ends: {"state", "t", "d" (seconds of the clock), facts}."""

    def __init__(self, run_dir: Path, name: str, clock: Clock) -> None:
        self._path = run_dir / "trace" / f"{name}.jsonl"
        self._descriptor: int | None = None
        self.clock = clock
        self._state = ""
        self._facts: dict[str, float | int | str] = {}
        self._since = clock.now()
        self._write({"process": name, "clock": self._since, "wall": clock.wall()})

    def enter(self, state: str, **facts: float | str) -> None:
        """Change to a state; does nothing if the process is in it already, with the same facts."""
        if state == self._state and facts == self._facts:
            return
        self._end_state()
        self._state = state
        self._facts = facts
        failpoint(state, **facts)

    def now(self) -> float:
        return self.clock.now()

    def span(self, state: str, since: float, **facts: float | str) -> None:
        """Write an activity in parallel to the states, from `since` until now."""
        self._write({"state": state, "t": since, "d": self.now() - since, "lane": 1, **facts})

    def counters(self, **values: float) -> None:
        self._write({"t": self.clock.now(), "values": values})

    def close(self) -> None:
        """Write the last state."""
        self._end_state()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _end_state(self) -> None:
        now = self.clock.now()
        if self._state:
            self._write({"state": self._state, "t": self._since, "d": now - self._since, **self._facts})
        self._since = now

    def _write(self, line: dict[str, object]) -> None:
        """A line that does not fit on the disk is left out: training does not wait for a trace."""
        try:
            if self._descriptor is None:
                make_folders(self._path.parent.parent, self._path.parent.name)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")
        except OSError as error:
            if not is_unwritable(error):
                raise
