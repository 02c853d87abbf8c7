"""Python processes that have imported torch and transformers when they start: forks of one process, which multiprocessing serves."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

IMPORTED = ("transformers", "headrace.trainer.learners.builtin", "headrace.launch.config.load", "safetensors.torch")


def start(script: str, arguments: Sequence[object]) -> ForkServerProcess:
    """Run a script as `python -c` does, with the environment of this process; `exitcode` is as that of a process."""
    process = _context().Process(target=_run, args=(script, [str(word) for word in arguments], dict(os.environ)))
    process.start()
    return process


@cache
def _context() -> ForkServerContext:
    """The server of this process. It outlives a test, so it has no mark of one in its environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    mark = os.environ.pop("HEADRACE_TEST", None)
    try:
        forkserver.ensure_running()
    finally:
        if mark is not None:
            os.environ["HEADRACE_TEST"] = mark
    return context


def _run(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a script of the tests
