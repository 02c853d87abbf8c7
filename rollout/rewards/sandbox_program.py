"""The last step before a program in the sandbox: its user, its limits, its environment.

`sandbox.py` runs the text of this file inside the sandbox, where the project cannot be imported: it uses Python's own modules alone.
"""

import json
import os
import resource
import sys
from typing import Any


def set_limits(bounds: dict[int, int]) -> None:
    """Bound this process's resources, by the host's own bounds where they are lower: they cannot be raised."""
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        allowed = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (allowed, allowed))


def become_program(limits: dict[str, Any]) -> None:
    """Replace this process by `home/main.py`; write to the descriptor `ready` just before."""
    home = limits["home"]
    uid = limits["uid"]
    ready = limits["ready"]
    os.chdir(home)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    set_limits(
        {
            resource.RLIMIT_NPROC: limits["max_processes"],
            resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,
            resource.RLIMIT_AS: limits["memory_mb"] << 20,
            resource.RLIMIT_FSIZE: limits["disk_mb"] << 20,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
        }
    )
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.write(ready, b"ready\n")
    os.close(ready)
    os.execve(sys.executable, [sys.executable, "-I", "-B", f"{home}/main.py"], environment)


if __name__ == "__main__":
    become_program(json.loads(sys.argv[1]))
