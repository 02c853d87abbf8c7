"""Runs a program that the policy wrote, for rewards that execute code.

    def passes(solution_str, tests):
        return float(run_python(solution_str + tests, timeout_s=5).exit_code == 0)

The program sees the files of the host read-only and writes to a directory of its own in memory, which ends with it. It has no
network, no Unix socket but streams between its own processes, and no memory beyond its processes' address spaces. Its processes are in a
namespace of their own, see no others and all end with the first of them, or at the deadline.

A program that root starts runs as a user without files; one that another user starts can read what that user can.
"""

import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...comm.errors import HeadraceError

log = logging.getLogger(__name__)

_START_S = 60.0
"""Longest time to set up the namespaces on a busy host, beside the program's own."""
_KILL_S = 30.0
_told: set[str] = set()


class SandboxError(HeadraceError):
    """The host could not start a program, which says nothing about the program."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended; its output may be cut."""

    exit_code: int | None
    """None if the deadline passed; 128 + n if signal n ended it."""
    stdout: str
    stderr: str
    weakness: str = ""
    """Why the host gives no namespaces, without which the program has the caller's network, files and processes, or no filter
    of system calls, without which it reaches Unix sockets and memory beyond its bound. Empty if it gives both.
    """


def run_python(
    code: str,
    stdin: str = "",
    *,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    max_processes: int = 16,
    disk_mb: int = 64,
    max_output: int = 1 << 16,
) -> SandboxResult:
    """Run a Python program; never raises for a fault of it. Raises `SandboxError` if the host cannot start it.

    `memory_mb` is each process's address space, `disk_mb` all of the program's files, `max_output` the characters kept of its
    output and of its errors; the rest is discarded.
    """
    limits = {"cpu_s": timeout_s, "memory_mb": memory_mb, "max_processes": max_processes, "disk_mb": disk_mb}
    status, reported = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as home,
        tempfile.TemporaryFile() as given,
        open(status) as told,
    ):
        Path(home, "main.py").write_text(code, encoding="utf-8", errors="replace")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        arguments = [json.dumps(limits | {"home": home}), str(os.getpid()), str(reported)]
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.rollout.rewards.sandbox_init", *arguments],
            stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[reported], start_new_session=True,
        )  # fmt: skip
        os.close(reported)
        try:
            weakness = _weakness(told)
            deadline = time.monotonic() + timeout_s
            texts = _read(process, deadline, max_output)
            exit_code = _wait(process, deadline)
        finally:
            _end(process)
    return SandboxResult(exit_code, *texts, weakness)


def _weakness(told: IO[str]) -> str:
    """Wait for the start of the program; returns what its sandbox lacks, which the log says once."""
    with selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        if not selector.select(_START_S):
            raise SandboxError(f"the sandbox does not start within {_START_S:g} s")
    if not (line := told.readline()):
        raise SandboxError("the sandbox ends before its program begins")
    start: dict[str, str] = json.loads(line)
    if start["problem"]:
        raise SandboxError(f"the sandbox {start['problem']}")
    weakness = start["weakness"]
    if weakness and weakness not in _told:
        _told.add(weakness)
        log.warning("programs run in a sandbox that is not whole: %s", weakness)
    return weakness


def _read(process: "subprocess.Popen[bytes]", deadline: float, most: int) -> tuple[str, str]:
    """The beginnings of output and errors, until both end or the deadline passes."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe, text in kept.items():
            selector.register(pipe, selectors.EVENT_READ, text)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if chunk := os.read(key.fd, 1 << 16):
                    key.data.extend(chunk[: most - len(key.data)])
                else:
                    selector.unregister(key.fileobj)
    stdout, stderr = (text.decode(errors="replace") for text in kept.values())
    return stdout, stderr


def _wait(process: "subprocess.Popen[bytes]", deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the guardian, which first kills everything that the program has started."""
    assert process.stdout is not None and process.stderr is not None
    process.terminate()
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        log.warning("the guardian of a sandbox does not end within %g s and is killed", _KILL_S)
        process.kill()
        process.wait(_KILL_S)
    process.stdout.close()
    process.stderr.close()
