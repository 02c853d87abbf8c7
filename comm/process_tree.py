"""Processes that end together with the process that started them. This module imports no other module of the project."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GUARDED = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: int, parent: int) -> None:
    """Ask the kernel to send signal `number` to this process when `parent` ends; end at once if `parent` has already ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def fork_guarded(parent: int) -> None:
    """Fork, and return in the child. The process that called stays as the child's guardian.

    The guardian ends when the child has ended, on SIGTERM, and with `parent`, which is its own. Before that it kills everything
    that the child has started, processes in other groups and sessions included: an orphan becomes a child of the guardian.
    Its exit code is the child's, or 128 + n if signal n ended the child.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _GUARDED)
    end_with_parent(signal.SIGTERM, parent)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child:
        _guard(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GUARDED)


def _guard(child: int) -> NoReturn:
    for descriptor in range(3):  # the child's pipes end with the child
        with suppress(OSError):
            os.close(descriptor)
    code = None
    # The owner of this wait is the guardian's parent: its SIGTERM or its death ends it.
    while code is None and signal.sigwait(_GUARDED) == signal.SIGCHLD:
        code = _reap(child)
    while pids := children_of(os.getpid()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    os._exit(128 + signal.SIGTERM if code is None else code)


def _reap(child: int) -> int | None:
    """Reap every process that has ended; returns the exit code of `child` if it is one of them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return None


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, from /proc."""
    return [child for child, parent in _parents().items() if parent == pid]


def kill_tree(pid: int, patience_s: float) -> list[int]:
    """Kill a process and all that it and those have started, in whichever session; returns those that live after `patience_s`.

    All are killed before it waits for any: otherwise a supervisor takes the end of its parent as a request to end in order.
    """
    parents = _parents()
    tree = [pid]
    for each in tree:  # it grows
        tree += [child for child, parent in parents.items() if parent == each]
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    deadline = time.monotonic() + patience_s
    while (left := [each for each in tree if _state(each) not in ("", "Z", "X")]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _parents() -> dict[int, int]:
    """The parent of each process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # the process has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process: empty if the process does not exist, Z if it has ended and waits for its parent."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
