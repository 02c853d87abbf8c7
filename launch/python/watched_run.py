"""A run whose Python caller watches it: it shows the run's lines, calls `on_step`, and ends the run in order when the caller is interrupted."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..config.run_folder import METRICS_FILE
from ..processes.launched import LauncherProcess

OnStep = Callable[[dict[str, Any]], object]
"""Gets the metrics of a step; True ends the run in order."""
_POLL_S = 0.1
_ERROR = "headrace: error: "
_MISTAKE = 2
"""The exit code for a mistake of the user's."""
_MOST_INTERRUPTS = 2
"""The launcher kills the run at the second one."""
_NUM_LINES = 15
_TAIL_BYTES = 1 << 14


class RunEnd(NamedTuple):
    """How the launcher ended: its exit code, and the error that it printed last, if any."""

    code: int
    error: str


class WatchedRun:
    """One run of the launcher, from its start to its end."""

    def __init__(self, run_dir: Path, on_step: OnStep | None) -> None:
        self._steps = NewSteps(run_dir / METRICS_FILE)
        self._on_step = on_step
        self._error: list[str] = []
        """The last error that was printed, with the lines after it."""
        self._is_kept = False
        """Whether its line is not shown yet."""

    def run(self, words: Sequence[str]) -> RunEnd:
        """Start the launcher and watch it to its end.

        Ctrl-C, and any error of the callback, ends the run in order and is raised then, as it is. A second Ctrl-C kills the run, and a
        third one does not wait for its end.
        """
        process = LauncherProcess(words)
        raised: BaseException | None = None
        num_interrupts = 0
        code = None
        try:
            process.start_reading()
            while code is None:
                try:
                    code = self._watch(process)
                except BaseException as error:
                    self._on_step = None
                    if raised is None or not isinstance(error, Exception):
                        if num_interrupts == _MOST_INTERRUPTS:
                            raise  # `close` kills what is left
                        num_interrupts += 1
                        process.interrupt()
                    raised = raised or error
        finally:
            process.close()
        if raised is not None:
            with suppress(OSError, ValueError):  # of a console that is closed
                self._show(process.lines(0))
            raise raised
        self._show(process.lines(0))
        self._call(process)
        if code != _MISTAKE:
            self._show_kept()
        return RunEnd(code, "\n".join(self._error).removeprefix(_ERROR))

    def _watch(self, process: LauncherProcess) -> int:
        """Show lines and call the callback until the launcher has ended; returns its exit code."""
        while (code := process.poll()) is None:
            self._show(process.lines(_POLL_S))
            self._call(process)
        return code

    def _call(self, process: LauncherProcess) -> None:
        if self._on_step is None:
            return
        for metrics in self._steps.read():
            if self._on_step(metrics) is True:
                self._on_step = None
                process.interrupt()
                return

    def _show(self, lines: Iterator[str]) -> None:
        """Print lines. An error is kept back until another line follows: the last one may become an exception."""
        for line in lines:
            if line.startswith(_ERROR):
                self._show_kept()
                self._error = [line]
                self._is_kept = True
                continue
            self._show_kept()
            if self._error:
                self._error.append(line)
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _show_kept(self) -> None:
        if self._is_kept:
            self._is_kept = False
            sys.stdout.write(self._error[0] + "\n")


class NewSteps:
    """The lines that are added to `metrics.jsonl`, each step once: a trainer that starts again writes those that it repeats again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = 0
        self._offset = 0
        self._last = -1
        for _ in self._lines():
            pass

    def read(self) -> Iterator[dict[str, Any]]:
        """The metrics of the steps since the last call."""
        for line in self._lines():
            metrics = json.loads(line)
            if metrics["step"] > self._last:
                self._last = metrics["step"]
                yield metrics

    def _lines(self) -> Iterator[bytes]:
        """The whole lines that are new."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file:  # a run that starts again keeps the file before under another name
                self._offset = 0
            self._file = status.st_ino
            # A run that continues cuts off the steps that it gives up, and the file may have grown since.
            self._offset = min(self._offset, status.st_size)
            file.seek(max(0, self._offset - 1))
            if self._offset and file.read(1) != b"\n":
                self._offset = 0  # `read` skips the steps that it has read
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line


def last_log_lines(run_dir: Path) -> str:
    """The last lines of the logs of a run, of those with a traceback, or else of the one that was written last; to append to a message."""
    logs = sorted((run_dir / "logs").glob("*.log"), key=lambda log: log.stat().st_mtime)
    tails = {log: _tail(log) for log in logs}
    broken = [log for log in logs if any(line.startswith("Traceback") for line in tails[log])]
    shown = broken[-2:] or logs[-1:]
    return "".join(
        f"\nThe last lines of {log}:" + "".join(f"\n    {line}" for line in tails[log][-_NUM_LINES:])
        for log in shown
        if tails[log]
    )


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
