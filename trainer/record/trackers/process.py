"""The process of a tracker: it gives the package what comes through the pipe, and the lines of `metrics.jsonl` that it lacks.

    python -m headrace.trainer.record.trackers.process wandb runs/demo 0 PARENT

It ends with its standard input, or with the trainer, whose end leaves it `END_S` more. What a package refuses is said once and counted.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from ....comm.disk import say
from ....comm.process_tree import children_of, kill_tree
from .feed import END_S, SAID
from .packages import PACKAGES, RunFacts
from .tracker import Histogram, Tracker

FOLDER = "trackers"
"""Folder of the run folder: for each tracker the id of its run and the last step that it has, and what the packages keep there."""
SILENCE_S = 60.0
"""Seconds of a call after which the console tells that the tracker does not answer."""
_LEAVE_S = 10.0
"""Longest time that the process has after the trainer has died."""
_WATCH_S = 0.5
_KILL_S = 5.0


class TrackerState:
    """The tracker's file in the run folder. It is locked: the process of a trainer that has died may not have ended yet."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Waits up to `_LEAVE_S` for the lock; raises `TimeoutError`."""
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{name}.json"
        self._lock = _locked(folder / f"{name}.lock")
        found: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
        self.id: str = found.get("id", "")
        """Of the tracker's run; empty for a new one."""
        self.last: int = found.get("step", 0)
        """The newest step that the tracker has; 0 before the first one."""

    def save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"id": self.id, "step": self.last}), encoding="utf-8")
        new.replace(self._path)


class TrackedRun:
    """Passes calls on to a tracker; counts those that fail."""

    def __init__(self, name: str, run_dir: Path, past_bytes: int) -> None:
        self.setting = f"run.report_to={name}"
        self._past = run_dir / "metrics.jsonl", past_bytes
        self._state = TrackerState(run_dir, name)
        self._given_up = self._state.last
        """Up to this step, the tracker has the numbers of an earlier process."""
        facts = RunFacts(run_dir.absolute().name, self._state.id, run_dir / FOLDER)
        self.tracker: Tracker = PACKAGES[name](facts)
        self._facts = facts
        self._num_failed = 0
        self._num_calls = 0
        self._is_repeated = False

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Open the tracker's run; give it the lines of steps that it lacks."""
        self.tracker.begin(config, changed)
        self._state.id = self._facts.id
        self._state.save()
        path, num_bytes = self._past
        if num_bytes:
            with path.open("rb") as file:
                for line in file.read(num_bytes).splitlines():
                    row = json.loads(line)
                    step = row["step"] + 1  # there it counts from 0
                    if step > self._state.last:
                        scalars = {name: row[name] for name in row if name not in ("step", "time_s")}
                        self.call("step", step, _numbers(scalars), {})

    def call(self, name: str, *arguments: Any) -> None:
        """One call of `Tracker`, but for a step that the tracker has already."""
        step = arguments[0] if name in ("step", "text") else None
        if step is not None and step <= self._given_up:
            if name == "step" and not self._is_repeated:
                say(f"{self.setting}: it keeps the numbers that it has of the steps up to {self._given_up}")
                self._is_repeated = True
            return
        self._num_calls += 1
        try:
            getattr(self.tracker, name)(*arguments)
            if name == "step":
                self._state.last = arguments[0]
                self._state.save()
        except Exception as error:  # noqa: BLE001 - whatever a package raises
            if not self._num_failed:
                say(
                    f"warning: {self.setting}: {in_words(error)}; training goes on, and further errors are only counted"
                )
            self._num_failed += 1

    def tell_failures(self) -> None:
        if self._num_failed:
            say(
                f"warning: {self.setting}: {self._num_failed} of {self._num_calls} calls failed; metrics.jsonl has all numbers"
            )


class Guard:
    """A thread that ends the process when it may not go on, and tells of a call that lasts long."""

    def __init__(self, setting: str, parent: int) -> None:
        self._setting = setting
        self._parent = parent
        self.ends_at = float("inf")
        """Time on the monotonic clock."""
        self.call_since = float("inf")
        """Since when the package has had the present call."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def _run(self) -> None:
        is_said = False
        while time.monotonic() < self.ends_at:
            time.sleep(_WATCH_S)
            if os.getppid() != self._parent:
                self.ends_at = min(self.ends_at, time.monotonic() + _LEAVE_S)
            if not is_said and time.monotonic() - self.call_since > SILENCE_S:
                say(f"warning: {self._setting}: it has not answered for {SILENCE_S:.0f} s; training goes on")
                is_said = True
        leave(1)


def main() -> None:
    """Read the pipe to its end."""
    name, run_dir, past_bytes, parent = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer decides, and may have to tell its last steps
        signal.signal(number, signal.SIG_IGN)
    guard = Guard(f"run.report_to={name}", int(parent))
    guard.start()
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a package that asks for a password gets none
    guard.call_since = time.monotonic()
    try:
        run = TrackedRun(name, Path(run_dir), int(past_bytes))
        _, config, changed = json.loads(next(lines))
        run.begin(config, changed)
    except Exception as error:  # noqa: BLE001 - whatever a package raises
        say(
            f"warning: run.report_to={name}: the run goes on without it ({in_words(error)}); metrics.jsonl has all numbers"
        )
        leave(SAID)
    guard.call_since = float("inf")
    results: dict[str, float] | None = None
    for line in lines:
        call, *arguments = json.loads(line)
        if call == "end":
            (results,) = arguments
            break
        if call == "step":
            arguments[2] = {each: Histogram(*parts) for each, parts in arguments[2].items()}
        guard.call_since = time.monotonic()
        run.call(call, *arguments)
        guard.call_since = float("inf")
    guard.ends_at = time.monotonic() + (_LEAVE_S if results is None else END_S)
    run.call("end", results)
    run.tell_failures()
    # A bound on the package's own work at exit, such as the removal of its files.
    signal.alarm(max(1, int(guard.ends_at - time.monotonic())))
    sys.exit(0)


def leave(code: int) -> NoReturn:
    """End this process and what the package has started, without the package's own work at the end of a process."""
    with suppress(OSError):
        sys.stdout.flush()
    for child in children_of(os.getpid()):
        kill_tree(child, _KILL_S)
    os._exit(code)


def in_words(error: Exception) -> str:
    """An error on one line, in characters that any console has."""
    return ascii(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])[1:-1]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _locked(path: Path) -> IO[bytes]:
    """The file with a lock, which ends with this process. On a file system without locks nothing is locked."""
    lock = path.open("wb")
    deadline = time.monotonic() + 2 * _LEAVE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process of this run still has {path}") from None
            time.sleep(_WATCH_S / 10)
        except OSError:
            return lock
        else:
            return lock


if __name__ == "__main__":
    main()
