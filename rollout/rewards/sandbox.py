"""Runs a program that the policy wrote, for rewards that execute code.

    def passes(solution_str, tests):
        return float(run_python(solution_str + tests, timeout_s=5).exit_code == 0)

Where bubblewrap (`bwrap`) is installed, the program sees the files of the host read-only and writes to a directory of its own in
memory, which ends with it. It has no network, no Unix socket but streams between its own processes, and no memory beyond its
processes' address spaces. Its processes are in a namespace of their own, see no others and all end with the first of them, or at
the deadline. A program that root starts runs as a user without files; one that another user starts can read what that user can.

Without bubblewrap only the limits, the filter of system calls and the end of all processes hold. `SandboxResult.weakness` and a
warning say so.
"""

import json
import logging
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from ...comm.errors import HeadraceError
from .sandbox_filter import filter_program

log = logging.getLogger(__name__)

_START_S = 60.0
"""Longest time to set up the namespaces on a busy host, in addition to the program's own time."""
_KILL_S = 30.0
_FIRST_UID = 1 << 21
"""Users of programs that root starts: one each, so that a limit of processes counts one program's alone."""
_NUM_UIDS = 1 << 20
_NOBODY = 65534
_INSIDE = Path(__file__).with_name("sandbox_program.py").read_text(encoding="utf-8")


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
    """The missing parts of the sandbox on this host; empty if it is complete."""


class _Isolation(NamedTuple):
    """How programs are isolated on this host. `bwrap` is empty where it cannot be used; `proc` shows the program its own /proc."""

    bwrap: str
    proc: tuple[str, ...]
    weakness: str


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
    isolation = _isolation()
    uid = _free_user() if os.getuid() == 0 else 0
    limits = {
        "cpu_s": timeout_s,
        "memory_mb": memory_mb,
        "max_processes": max_processes,
        "disk_mb": disk_mb,
        "uid": uid,
    }
    ready, told = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as home,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as calls,
        open(ready) as begun,
    ):
        program = Path(home, "main.py")
        program.write_text(code, encoding="utf-8", errors="replace")
        program.chmod(0o644)
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        command = _command(isolation, program, limits | {"home": home, "ready": told}, calls)
        process = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[told, calls.fileno()],
            start_new_session=True,
        )  # fmt: skip
        os.close(told)
        try:
            _wait_for_begin(begun, process)
            deadline = time.monotonic() + timeout_s
            texts = _read(process, deadline, max_output)
            exit_code = _wait(process, deadline)
        finally:
            _end(process)
    return SandboxResult(exit_code, *texts, isolation.weakness)


def _command(isolation: _Isolation, program: Path, limits: dict[str, Any], calls: IO[bytes]) -> list[str]:
    """The command that becomes the program; `calls` is the file for the filter of system calls."""
    uid = limits["uid"]
    home = limits["home"]
    words = json.dumps(limits)
    if isolation.bwrap:
        inside = [sys.executable, "-I", "-S", "-B", "-c", _INSIDE, words]
        own_files = ["--perms", "1777", "--size", str(limits["disk_mb"] << 20), "--tmpfs", home]
        own_files += ["--ro-bind", str(program), str(program)]
        return [isolation.bwrap, *_namespaces(uid), *isolation.proc, *own_files, *_filter(calls), *inside]
    if uid and _uncovered():
        raise SandboxError(f"other users cannot reach {sys.executable}, and {isolation.weakness}")
    if uid:
        os.chown(home, uid, uid)
    return [sys.executable, "-m", f"{__package__}.sandbox_guard", words, str(os.getpid())]


@cache
def _isolation() -> _Isolation:
    """The isolation that this host supports, tried once; the log says what is missing."""
    found = _tried()
    if found.weakness:
        log.warning("programs run in a weaker sandbox: %s", found.weakness)
    return found


def _tried() -> _Isolation:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return _Isolation(
            "", (), "bubblewrap (bwrap) is not installed, so a program has the host's network, files and processes"
        )
    try:
        filter_program()
        weakness = ""
    except OSError as error:
        weakness = str(error)
    problem = ""
    # Some containers refuse a /proc of its own; then the program has an empty one, not the host's.
    for proc in (("--proc", "/proc"), ("--size", "4096", "--tmpfs", "/proc", "--remount-ro", "/proc")):
        command = [bwrap, *_namespaces(_free_user() if os.getuid() == 0 else 0), *proc, "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
        if done.returncode == 0:
            return _Isolation(bwrap, proc, weakness)
        problem = problem or done.stderr.strip()
    return _Isolation("", (), f"{problem}, so a program has the host's network, files and processes")


def _namespaces(uid: int) -> list[str]:
    """Arguments of bwrap: namespaces of its own, the host's files read-only. With `uid` root becomes this user inside."""
    words = ["--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if uid:
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:  # its own user, even if that is root, has no rights in the namespaces
        own = os.getuid() or _NOBODY
        group = os.getgid() or _NOBODY
        words += ["--unshare-user", "--uid", str(own), "--gid", str(group)]
    words += ["--ro-bind", "/", "/", "--dev", "/dev", "--remount-ro", "/dev"]
    return words + (_uncovered() if uid else [])


def _uncovered() -> list[str]:
    """Make Python's folders reachable for other users: a parent that is closed to them becomes a folder with these alone."""
    closed: dict[str, str] = {}
    for folder in {os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}:
        parent = next((each for each in reversed(Path(folder).parents) if not each.stat().st_mode & 1), None)
        if parent is not None:
            closed[folder] = str(parent)
    words: list[str] = []
    for parent in sorted(set(closed.values())):
        words += ["--perms", "0755", "--size", str(1 << 20), "--tmpfs", parent]
    for folder, parent in sorted(closed.items()):
        between = [each for each in reversed(Path(folder).parents) if each.is_relative_to(parent)][1:]
        for each in between:
            words += ["--perms", "0755", "--dir", str(each)]
        words += ["--ro-bind", folder, folder]
    return words


def _filter(file: IO[bytes]) -> list[str]:
    """Arguments of bwrap for the filter of system calls, which goes to the file."""
    try:
        file.write(filter_program())
    except OSError:  # a machine that it does not know: the weakness says so
        return []
    file.seek(0)
    return ["--seccomp", str(file.fileno())]


def _free_user() -> int:
    """A user of one program alone, which the user namespace knows; 0 if it knows root alone, as in some containers."""
    texts = [Path(f"/proc/self/{kind}_map").read_text() for kind in ("uid", "gid")]
    maps = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in texts]
    end = min(max(first + count for first, _, count in each) for each in maps)
    some = random.randrange(_NUM_UIDS)
    for user in (_FIRST_UID + some, end - 1 - some % max(1, end // 2)):
        if all(any(first <= user < first + count for first, _, count in each) for each in maps):
            return user
    return 0


def _wait_for_begin(begun: IO[str], process: "subprocess.Popen[bytes]") -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(begun, selectors.EVENT_READ)
        if not selector.select(_START_S):
            raise SandboxError(f"the sandbox did not start within {_START_S:g} s")
    if begun.readline() != "ready\n":
        assert process.stderr is not None
        process.terminate()
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise SandboxError(
            f"the sandbox ended before its program started: {errors[-1] if errors else 'no error output'}"
        )


def _read(process: "subprocess.Popen[bytes]", deadline: float, most: int) -> tuple[str, str]:
    """The beginnings of stdout and stderr, until both end or the deadline passes."""
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
