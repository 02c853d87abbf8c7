"""The launcher as a child of a Python caller, whose signals and threads it leaves alone.

A script or notebook has threads of its own, so it cannot wait for signals as the launcher does. The child ends in order when its
parent ends.
"""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...comm.process_tree import end_with_parent, kill_tree
from ...comm.threads import new_thread

_KILL_S = 10.0


class LauncherProcess:
    """`headrace.launch.run` with the words of a command line, its output as lines."""

    def __init__(self, words: Sequence[str]) -> None:
        """Start it, in a session of its own: a terminal's Ctrl-C reaches it once, through its parent."""
        command = [sys.executable, "-m", "headrace.launch.processes.launched", str(os.getpid()), *words]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        # Its reader never waits for the caller, whose callback may take long: a full pipe would stop the run.
        self._reader = new_thread(self._read, "output of a run")

    def start_reading(self) -> None:
        """Begin to take its output, which `lines` gives."""
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def lines(self, seconds: float) -> Iterator[str]:
        """The lines that are there, without their ends; waits at most so long for the first one."""
        with suppress(queue.Empty):
            yield self._lines.get(timeout=seconds)
            while True:
                yield self._lines.get_nowait()

    def interrupt(self) -> None:
        """Let the run end in order, as Ctrl-C does; a second time the launcher kills it."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Kill what is left, and read the rest of the output."""
        if self._process.poll() is None:
            kill_tree(self._process.pid, _KILL_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._reader.join(_KILL_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line.rstrip("\n"))


def main(words: Sequence[str]) -> int:
    """The child: the launcher, which ends in order when the process with the first word's id ends."""
    end_with_parent(signal.SIGTERM, int(words[0]))
    from ..run import main as run_main

    return run_main(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
