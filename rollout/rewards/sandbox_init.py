"""The processes around a program in the sandbox: `sandbox.py` starts this module.

    guardian --- init --- program, process 1 of its namespace

The guardian kills what is left when init ends, when it is told to, and when its own parent ends. Init enters namespaces of
processes, mounts, network and IPC, and waits for the program. Without them (a host may forbid them) the limits and the guardian
still hold.
"""

import ctypes
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from ...comm.process_tree import fork_guarded
from .sandbox_filter import filter_calls

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID_NODEV = 0x1000, 0x4000, 0x40000, 0x2 | 0x4
_MS_RDONLY_NOEXEC = 0x1 | 0x8
_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY = 442, 0x8000, 1
_FIRST_UID = 1 << 21
"""Users of programs that root starts: one each, so that a limit of processes counts one program's alone."""
_NOBODY = 65534
_WEAKNESS = "weakness: "
_libc = ctypes.CDLL(None, use_errno=True)


def isolate(home: str, disk_mb: int, *, changes_user: bool) -> str:
    """Enter namespaces, make the host's files read-only, mount `home` in memory; returns why not, if not.

    changes_user: the program runs as another user. Else its own user, even if that is root, has no rights in the namespaces.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        _check(_libc.unshare(_NEWPID | _NEWNS | _NEWNET | _NEWIPC | (0 if changes_user else _NEWUSER)), "unshare")
        if not changes_user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid or _NOBODY} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid or _NOBODY} {gid} 1")
        _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        if changes_user:
            _uncover({os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)})
        attributes = (ctypes.c_uint64 * 4)(_RDONLY, 0, 0, 0)
        _check(
            _libc.syscall(_MOUNT_SETATTR, -1, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)), "read-only"
        )
        options = f"size={disk_mb}m,mode=1777".encode()
        _check(_libc.mount(b"sandbox", home.encode(), b"tmpfs", _MS_NOSUID_NODEV, options), "tmpfs")
    except OSError as error:
        return str(error)
    return ""


def run_program(limits: dict[str, Any], code: str, uid: int, *, is_isolated: bool, on_weakness: int) -> None:
    """Become the program, in `home`, under its limits; why system calls are not filtered goes to the pipe `on_weakness`."""
    home = limits["home"]
    if is_isolated:
        _hide_processes()
    os.chdir(home)
    Path("main.py").write_text(code, encoding="utf-8")
    memory, disk = limits["memory_mb"] << 20, limits["disk_mb"] << 20
    bounds = {
        resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: disk,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _check(_libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    try:
        filter_calls()
    except OSError as error:
        os.write(on_weakness, f"{_WEAKNESS}{error}".encode())
    set_limits({resource.RLIMIT_NPROC: limits["max_processes"]} | bounds)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-I", "-B", f"{home}/main.py"], environment)


def set_limits(bounds: dict[int, int]) -> None:
    """Bound this process's resources, by the host's own bounds where they are lower: they cannot be raised."""
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        allowed = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (allowed, allowed))


def main() -> None:
    """Guard, isolate, run. The arguments are the limits, the process that starts this one, and where to say how it starts.

    It says `weakness` and `problem` as one JSON line. With a problem the program does not run.
    """
    limits, parent, status = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fork_guarded(parent)
    home, uid = limits["home"], _free_user() if os.getuid() == 0 else 0
    code = Path(home, "main.py").read_text(encoding="utf-8")
    weakness = isolate(home, limits["disk_mb"], changes_user=uid > 0)
    if weakness and uid:
        os.chown(home, uid, uid)
        os.chown(Path(home, "main.py"), uid, uid)
    started, problem = os.pipe()
    if (program := os.fork()) == 0:
        os.close(status)
        try:
            run_program(limits, code, uid, is_isolated=not weakness, on_weakness=problem)
        except (OSError, ValueError) as error:
            os.write(problem, f"cannot run {sys.executable}: {error}".encode())
        os._exit(126)
    os.close(problem)
    with open(started) as telling:  # it ends when the program begins
        told = telling.read()
    if told.startswith(_WEAKNESS):
        weakness, told = weakness or told.removeprefix(_WEAKNESS), ""
    os.write(status, json.dumps({"weakness": weakness, "problem": told}).encode() + b"\n")
    os.close(status)
    for standard in (0, 1, 2):
        os.close(standard)  # the program's output ends with the program
    code_of = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os._exit(code_of if code_of >= 0 else 128 - code_of)


def _hide_processes() -> None:
    """Show the program's own namespace of processes in /proc, where a container allows it, and else nothing: not the host's."""
    flags = _MS_NOSUID_NODEV | _MS_RDONLY_NOEXEC
    if _libc.mount(b"proc", b"/proc", b"proc", flags, None):
        _check(_libc.mount(b"sandbox", b"/proc", b"tmpfs", flags, b"size=0,mode=555"), "/proc")


def _free_user() -> int:
    """A user of this program alone, which the user namespace knows; 0 if it knows root alone, as in some containers."""
    texts = [Path(f"/proc/self/{kind}_map").read_text() for kind in ("uid", "gid")]
    maps = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in texts]
    end = min(max(first + count for first, _, count in each) for each in maps)
    for user in (_FIRST_UID + os.getpid(), end - 1 - os.getpid() % max(1, end // 2)):
        if all(any(first <= user < first + count for first, _, count in each) for each in maps):
            return user
    return 0


def _uncover(folders: set[str]) -> None:
    """Make Python's folders reachable for other users: a parent that is closed to them becomes a folder with these alone."""
    closed: dict[str, tuple[Path, int]] = {}
    for folder in folders:
        parent = next((each for each in reversed(Path(folder).parents) if not each.stat().st_mode & 1), None)
        if parent is not None:
            closed[folder] = (parent, os.open(folder, os.O_PATH))
    for parent in {parent for parent, _ in closed.values()}:
        _check(_libc.mount(b"sandbox", bytes(parent), b"tmpfs", _MS_NOSUID_NODEV, b"size=1m,mode=755"), f"{parent}")
    for folder, (_, descriptor) in closed.items():
        os.makedirs(folder)
        source = f"/proc/self/fd/{descriptor}".encode()
        _check(_libc.mount(source, folder.encode(), None, _MS_BIND | _MS_REC, None), folder)
        os.close(descriptor)


def _check(result: int, action: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
