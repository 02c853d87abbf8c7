"""Child processes that cannot outlive their parent, and the messages about them on the console."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from ...comm.environment import RESOLVER_ENV
from ...comm.process_tree import end_with_parent
from .signals import WATCHED

_EVENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ")


@dataclass(frozen=True, slots=True)
class ChildCommands:
    """The commands of a supervisor's children; the supervisor adds the arguments that depend on the role."""

    worker: Sequence[str] = (sys.executable, "-X", "faulthandler", "-m", "headrace.launch.processes.role_process")
    store: Sequence[str] = (sys.executable, "-m", "headrace.comm.store")


class Child:
    """One child process: `name` in messages, `log` its log file, if it has one."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        console: bool = True,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        death_signal: signal.Signals = signal.SIGKILL,
        ignores_sigterm: bool = False,
    ) -> None:
        """Start `command`. With `log`, stderr goes to that file. Without `console`, stdout follows it, or is discarded.

        Raises OSError if the machine has no more processes, memory, files or room at this moment, or the folder above the log's is gone.

        The child gets a session of its own, so that a terminal's Ctrl-C reaches it once, through its parent. The kernel
        sends it `death_signal` if the parent ends first. With `ignores_sigterm` a SIGTERM is lost on it, unless it sets a handler.
        """
        self.name = name
        self.log = log
        parent = os.getpid()

        def prepare() -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # only the hub acts on it; by default it would end a process
            signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores_sigterm else signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            end_with_parent(death_signal, parent)

        if log is not None:
            log.parent.mkdir(exist_ok=True)
        with nullcontext() if log is None else log.open("ab") as stream:
            self._process = subprocess.Popen(
                command,
                env={**RESOLVER_ENV, **os.environ, **(environment or {})},
                stdin=stdin,
                stdout=None if console else stream or subprocess.DEVNULL,
                stderr=stream,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - the parents that use this have one thread
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal; a process that has already ended is ignored."""
        self._process.send_signal(number)

    def note(self, text: str) -> None:
        """Write a line of the parent's into the log, with the time."""
        if self.log is not None:
            with suppress(OSError), self.log.open("a") as stream:  # its folder may be gone, and its disk full
                stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 INFO {__name__}: {text}\n")

    def log_tail(self, num_lines: int = 12) -> str:
        """The path of the log and its last lines, as a sentence to append to a message; empty without a log."""
        if self.log is None or not self.log.exists():
            return ""
        lines = self._last_lines(num_lines)
        return f". Its log is {self.log}" + (":" if lines else "") + "".join(f"\n    {line}" for line in lines)

    def last_line(self) -> str:
        """The last line of the log, which names the error of a Python program, to append to a message."""
        return "".join(f": {line}" for line in self._last_lines(1))

    def _last_lines(self, num_lines: int) -> list[str]:
        """The last lines of the log that are not about the usual course of a run."""
        if self.log is None or not self.log.exists():
            return []
        with self.log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 16384))
            found = stream.read().decode(errors="replace").splitlines()
        return [line for line in found if not _EVENT.match(line)][-num_lines:]


def describe_exit(name: str, code: int) -> str:
    """How a child ended, such as `rollout-1 was ended by SIGKILL`."""
    if code < 0:
        return f"{name} was ended by {signal.Signals(-code).name}"
    return f"{name} ended with exit code {code}"


def print_message(text: str) -> None:
    """Print a message of the launcher or of a supervisor on the console."""
    with suppress(OSError):  # it may go to a file on a full disk
        sys.stderr.write(f"headrace: {text}\n")
        sys.stderr.flush()
