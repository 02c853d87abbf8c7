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

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID_NODEV = 0x1000, 0x4000, 0x40000, 0x2 | 0x4
_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY = 442, 0x8000, 1
_FIRST_UID = 1 << 21
"""Users of programs that root starts: one each, so that a limit of processes counts one program's alone."""
_libc = ctypes.CDLL(None, use_errno=True)


def isolate(home: str, disk_mb: int) -> str:
    """Enter namespaces, make the host's files read-only, mount `home` in memory; returns why not, if not."""
    uid, gid = os.getuid(), os.getgid()
    try:
        _check(_libc.unshare(_NEWPID | _NEWNS | _NEWNET | _NEWIPC | (_NEWUSER if uid else 0)), "unshare")
        if uid:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        if not uid:
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


def run_program(limits: dict[str, Any], code: str, uid: int) -> None:
    """Become the program, in `home`, under its limits."""
    home = limits["home"]
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
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["max_processes"], limits["max_processes"]))
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-I", "-B", f"{home}/main.py"], environment)


def main() -> None:
    """Guard, isolate, run. The arguments are the limits, the process that starts this one, and where to say what is lacking."""
    limits, parent, status = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fork_guarded(parent)
    code = Path(limits["home"], "main.py").read_text(encoding="utf-8")
    is_root = os.getuid() == 0
    weakness = isolate(limits["home"], limits["disk_mb"])
    uid = _FIRST_UID + os.getpid() if is_root else 0
    if weakness and uid:
        os.chown(limits["home"], uid, uid)
        os.chown(Path(limits["home"], "main.py"), uid, uid)
    if (program := os.fork()) == 0:
        os.close(status)
        try:
            run_program(limits, code, uid)
        except OSError as error:
            os.write(2, f"sandbox: cannot run {sys.executable}: {error}\n".encode())
        os._exit(126)
    os.write(status, f"{weakness}\n".encode())
    os.close(status)
    for standard in (0, 1, 2):
        os.close(standard)  # the program's output ends with the program
    code_of = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os._exit(code_of if code_of >= 0 else 128 - code_of)


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
