"""Python processes that have imported torch and transformers when they start: forks of one process, which multiprocessing serves."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

IMPORTED = (
    "transformers", "safetensors.torch", "headrace.launch.start", "headrace.launch.processes.role_process", "headrace.relay.hub.loop",
    "headrace.relay.loop", "headrace.trainer.loop", "headrace.trainer.learners.builtin", "headrace.rollout.loop",
    "headrace.rollout.generators.builtin", "torch.distributed.run",
)  # fmt: skip
_OWN = {"HEADRACE_TEST": None, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""The environment of the server: it outlives a test, so it has no mark of one, and libraries read the rest when they are imported."""


def start(script: str, arguments: Sequence[object]) -> ForkServerProcess:
    """Run a script as `python -c` does, with the environment of this process; `exitcode` is as that of a process."""
    process = _context().Process(target=_run, args=(script, [str(word) for word in arguments], dict(os.environ)))
    process.start()
    return process


class Command:
    """`python WORDS` as a fork, with the methods of `Popen`; its output goes to a file."""

    def __init__(self, words: Sequence[str], console: Path) -> None:
        self._process = _context().Process(target=_command, args=(list(words), str(console), dict(os.environ)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises `TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("headrace", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _context() -> ForkServerContext:
    """The server of this process, started at its first use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    before = {name: os.environ.pop(name, None) for name in _OWN}
    os.environ.update({name: value for name, value in _OWN.items() if value is not None})
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return context


def _command(words: list[str], console: str, environment: dict[str, str]) -> None:
    from . import forked_commands

    os.environ.clear()
    os.environ.update(environment)
    forked_commands.run(words, console)


def _run(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a script of the tests
