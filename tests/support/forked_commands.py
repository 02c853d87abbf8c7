"""Python commands as forks of a process that has imported torch and transformers: `python -m MODULE` costs no import there.

A fork has what a new process has: a pid of its own below its real parent, the descriptors, the environment, the signals and the working
folder that `Popen` gave it, and its command line and environment in `/proc`. So supervisors, signals and kills are real. But it inherits
whatever its parent has changed in imported modules. Tests of single runs use forks; the slow ones start new processes.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

FORKED = (
    "headrace.launch.run",
    "headrace.launch.processes.role_process",
    "headrace.comm.store",
    "torch.distributed.run",
)
"""Modules whose processes are forks. Other commands are started as ever: what a rollout starts would inherit the locks of its threads."""
_FIRST_OWN = 3
"""The first descriptor beside standard input, output and error."""
_FIRST_COPY = 200
"""Descriptors are copied from here on for a fork. In it libuv, which torchrun has loaded, closes the numbers of its own pipe, which may be
others here by now, and opens them again."""


def run(words: Sequence[str], console: str) -> NoReturn:
    """Be `python WORDS`, and fork what it starts. The output goes to a file."""
    file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    _inherit([-1, -1, -1, file, -1, file], [])
    original = subprocess._fork_exec  # pyright: ignore[reportAttributeAccessIssue]
    subprocess._fork_exec = lambda *given: _fork_exec(original, *given)  # pyright: ignore[reportAttributeAccessIssue]
    _show([sys.executable, *words])
    _run_module(words)


def _fork_exec(
    original: Any, words: Sequence[bytes], executables: Any, closes: bool, kept: Sequence[int], *given: Any
) -> int:
    """As `_posixsubprocess.fork_exec`."""
    texts = [os.fsdecode(word) for word in words]
    if texts[0] != sys.executable or "-m" not in texts or texts[texts.index("-m") + 1] not in FORKED:
        return original(words, executables, closes, kept, *given)
    folder, environment, *pipes = given[:10]
    is_session, prepare = given[11], given[17]
    kept = [each for each in kept if each != pipes[7]]  # the end of that one says that the process has started
    copies = {each: fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_COPY) for each in {*pipes[:6], *kept} - {-1}}
    if pid := os.fork():
        for copy in copies.values():
            os.close(copy)
        return pid
    try:
        for number in kept:
            os.dup2(copies[number], number)
        _inherit([copies.get(each, -1) for each in pipes[:6]], kept)
        if folder is not None:
            os.chdir(folder)
        _forget_signals()
        if is_session:
            os.setsid()
        if prepare is not None:
            prepare()
        if environment is not None:
            os.environ.clear()
            for entry in environment:
                name, _, value = os.fsdecode(entry).partition("=")
                os.environ[name] = value
        _show(texts)
        _run_module(texts[1:])
    finally:
        os._exit(70)


def _inherit(pipes: Sequence[int], kept: Sequence[int]) -> None:
    """Take the ends of the pipes as standard input, output and error, and close all descriptors but these and `kept`."""
    wanted = (pipes[0], pipes[3], pipes[5])
    for place, copy in enumerate([-1 if each == -1 else os.dup(each) for each in wanted]):
        if copy != -1:
            os.dup2(copy, place)
    last = _FIRST_OWN
    for descriptor in kept:
        os.closerange(last, descriptor)
        last = descriptor + 1
    os.closerange(last, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _forget_signals() -> None:
    """A new program has no handlers but those of Python itself; what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if not isinstance(signal.getsignal(number), signal.Handlers | None):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _show(words: Sequence[str]) -> None:
    """Let `/proc` show this command line and environment: both are read from the memory of the first process."""
    environment = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items(), key=lambda entry: not entry[0].startswith("HEADRACE"))
    ]
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for first, texts in ((45, words), (47, environment)):
        start, end = int(fields[first]), int(fields[first + 1])
        content = b"\0".join(map(os.fsencode, texts))[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))


def _run_module(words: Sequence[str]) -> NoReturn:
    """`python WORDS`, of which one is -m."""
    place = words.index("-m")
    sys.modules.pop(words[place + 1], None)
    if "faulthandler" in words[:place]:
        faulthandler.enable()
    atexit._clear()
    gc.freeze()
    sys.argv = ["-m", *words[place + 2 :]]
    code: Any = 0
    try:
        runpy.run_module(words[place + 1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter does with an uncaught error
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
