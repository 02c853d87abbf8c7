"""Spares: a second process of a role that has imported its modules and waits until the first one has died.

Nearly all of a restart is imports: of torch, and in the trainer of transformers. All other processes wait for a hub or a relay, and
training waits for each rank of the trainer. A spare touches no device: the memory of the GPU is the first process's.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .child import Child, print_message

SPARED: Mapping[str, Sequence[str]] = {
    "actor": ("headrace.trainer.loop", "headrace.trainer.learners.builtin", "headrace.comm.store"),
    "hub": ("headrace.relay.hub.loop", "headrace.comm.store"),
    "relay": ("headrace.relay.loop", "headrace.comm.store"),
}
"""The roles that have spares, and the modules that these import."""
SPARE_AFTER_ENV = "HEADRACE_SPARE_AFTER_S"
SPARE_AFTER_S = float(os.environ.get(SPARE_AFTER_ENV, "10"))
"""Age of a process at which its spare starts: the start of a run is not slower for it. `inf` in the environment is for runs of a few
seconds, such as those of the tests, to which the imports of spares are most of their work."""
_OPTION = b"--spare"
"""The word of its command line that makes a process a spare."""
_READY = "spare-ready"
"""The name of a spare's main thread once its modules are imported."""
_TAKEN = "spare-taken"
"""The name of its main thread once it is needed."""


class Spares:
    """The spares of one supervisor, for processes of these roles. `start` starts the spare of a name with this standard input."""

    def __init__(
        self, start: Callable[[str, int], Child], roles: Collection[str], after_s: float = SPARE_AFTER_S
    ) -> None:
        self._start = start
        self._roles = roles
        self._after_s = after_s
        self._due: dict[str, float] = {}
        self._waiting: dict[str, tuple[Child, int]] = {}

    def take(self, name: str) -> Child | None:
        """The spare of this name, which now goes on as a role's process, or None. The next one is due later."""
        if name.partition("-")[0] in self._roles:
            self._due[name] = time.monotonic() + self._after_s
        if name not in self._waiting:
            return None
        child, pipe = self._waiting.pop(name)
        with suppress(BrokenPipeError):
            os.write(pipe, b"\n")
        os.close(pipe)
        return child if child.poll() is None else None

    def keep(self) -> None:
        """Start those that are due; one that has ended or cannot be started is due later: the run does not need it."""
        now = time.monotonic()
        for name, (child, pipe) in list(self._waiting.items()):
            if child.poll() is not None:
                del self._waiting[name]
                os.close(pipe)
                self._due[name] = now + self._after_s
        for name, due in self._due.items():
            if name not in self._waiting and now >= due:
                try:
                    self._waiting[name] = self._start_one(name)
                except OSError as error:
                    self._due[name] = now + self._after_s
                    print_message(f"the spare of {name} cannot be started now: {error}")

    def _start_one(self, name: str) -> tuple[Child, int]:
        """A spare, and the pipe to its standard input. Raises OSError if the machine has no more processes, memory or files."""
        reading, writing = os.pipe()
        try:
            return self._start(name, reading), writing
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)

    def end(self) -> None:
        """End all of them: a spare ends when its standard input does."""
        for _, pipe in self._waiting.values():
            os.close(pipe)
        self._waiting.clear()


def wait_until_needed(modules: Iterable[str]) -> bool:
    """Import the modules, then wait for a byte of standard input; returns whether it came before the end.

    The supervisor owns the wait; the kernel ends this process if the supervisor dies.
    """
    for module in modules:
        importlib.import_module(module)
    Path("/proc/self/comm").write_text(_READY)
    is_needed = bool(sys.stdin.buffer.read(1))
    if is_needed:
        Path("/proc/self/comm").write_text(_TAKEN)
    return is_needed


def is_spare(process: Path) -> bool:
    """Whether a process, by its folder in /proc, is a spare that is not needed yet: from its first moment. Raises OSError if it has ended."""
    if _OPTION not in (process / "cmdline").read_bytes().split(b"\0"):
        return False
    return (process / "comm").read_text().strip() != _TAKEN


def is_ready(process: Path) -> bool:
    """Whether a process, by its folder in /proc, is a spare that has its modules. Raises OSError if it has ended."""
    return (process / "comm").read_text().strip() == _READY
