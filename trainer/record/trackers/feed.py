"""The trainer's end of a tracker: a process that runs the tracker's package, and the pipe to it.

A thread of the trainer would not do. A package's own threads end the trainer when they fail (`role_process.on_thread_death`), its import
holds the interpreter for seconds, and a call that hangs can be ended with its process alone.
"""

import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....comm.disk import say
from ....comm.environment import environment_of_users_code
from ....comm.process_tree import kill_tree
from ....comm.waits import Wait, waiting
from .tracker import Histogram

MOST_BYTES = 8 << 20
"""Bytes that wait for a tracker's process, beside those in the pipe: 1,000 steps or more."""
END_S = 60.0
"""Longest time that the end of a run waits for its trackers."""
SAID = 3
"""Exit code of a tracker's process that has told the reason itself."""
_KILL_S = 5.0
_PIPE_BYTES = 1 << 20


class TrackerFeed:
    """A `Tracker` whose calls only write to a pipe, and never wait. `closed` waits for the process, up to a deadline."""

    def __init__(self, name: str, run_dir: Path, past_bytes: int, most_bytes: int = MOST_BYTES) -> None:
        """name: as in `run.report_to`. past_bytes: size of `metrics.jsonl` now, whose lines the tracker may lack."""
        self.name = name
        self._setting = f"run.report_to={name}"
        self._most_bytes = most_bytes
        self._unsent = bytearray()
        self._num_lost = 0
        self._is_gone = False
        """Nothing reads the pipe any more."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headrace.trainer.record.trackers.process",
                name,
                str(run_dir),
                str(past_bytes),
                str(os.getpid()),
            ],
            env=environment_of_users_code(),
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        with suppress(OSError):  # the user's pipes may be at their limit
            fcntl.fcntl(self._pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        self._send("begin", config, changed)

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self._send("step", step, scalars, histograms)

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        self._send("evaluation", version, scalars)

    def text(self, step: int, name: str, text: str) -> None:
        self._send("text", step, name, text)

    def end(self, results: Mapping[str, float] | None) -> None:
        self._send("end", results)

    def closed(self, deadline_s: float) -> None:
        """Wait at most so long until the process has taken everything and has ended; then end it."""
        with waiting(self.name, "the last numbers", deadline_s) as wait:
            self._flush(wait)
            self._pipe.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait.remaining_s)
        if self._process.poll() is None:
            kill_tree(self._process.pid, _KILL_S)
            with suppress(subprocess.TimeoutExpired):  # it may be in a call of the kernel that has not returned
                self._process.wait(_KILL_S)
            say(
                f"warning: {self._setting}: it has not finished within {deadline_s:g} s of the end of the run, so its process was"
                " ended; metrics.jsonl has all numbers"
            )
        elif self._process.returncode not in (0, SAID):
            say(f"warning: {self._setting}: its process has failed with exit code {self._process.returncode}")
        if self._num_lost:
            say(f"warning: {self._setting}: {self._num_lost} calls were left out; metrics.jsonl has all numbers")

    def _send(self, call: str, *arguments: Any) -> None:
        if self._is_gone:
            return
        line = json.dumps([call, *arguments]).encode() + b"\n"
        if len(self._unsent) + len(line) > self._most_bytes:
            self._flush()
        if len(self._unsent) + len(line) > self._most_bytes and call != "end":
            if not self._num_lost:
                say(f"warning: {self._setting}: it takes nothing at present; what does not fit into memory is left out")
            self._num_lost += 1
            return
        self._unsent += line
        self._flush()

    def _flush(self, wait: Wait | None = None) -> None:
        """Write what the pipe takes at once, or what it takes during `wait`."""
        try:
            while self._unsent and not self._is_gone:
                try:
                    del self._unsent[: os.write(self._pipe.fileno(), self._unsent[:_PIPE_BYTES])]
                except BlockingIOError:
                    if wait is None or not wait.remaining_s:
                        return
                    poll = select.poll()
                    poll.register(self._pipe.fileno(), select.POLLOUT)
                    poll.poll(1000 * wait.remaining_s)
        except BrokenPipeError:  # it has said why, or `closed` does
            self._is_gone = True
            self._unsent.clear()
