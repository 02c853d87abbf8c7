"""The limits of a sandbox on a host that has limits of its own."""

import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.rollout.rewards.sandbox import run_python
from headrace.rollout.rewards.sandbox_program import set_limits


def test_a_limit_is_the_hosts_own_where_that_is_lower(monkeypatch: pytest.MonkeyPatch):
    of_host = {resource.RLIMIT_NOFILE: 32, resource.RLIMIT_FSIZE: 1 << 30, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    set_to: dict[int, int] = {}

    def set_one(kind: int, bounds: tuple[int, int]) -> None:
        if of_host[kind] != resource.RLIM_INFINITY and bounds[1] > of_host[kind]:
            raise ValueError("not allowed to raise maximum limit")
        set_to[kind] = bounds[1]

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, of_host[kind]))
    monkeypatch.setattr(resource, "setrlimit", set_one)
    set_limits(dict.fromkeys(of_host, 64))
    assert set_to == {resource.RLIMIT_NOFILE: 32, resource.RLIMIT_FSIZE: 64, resource.RLIMIT_AS: 64}


@pytest.fixture
def whole_sandbox():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (apt-get install bubblewrap)")
    if weakness := run_python("").weakness:
        pytest.skip(f"this host gives no whole sandbox: {weakness}")


ATTEMPTS = {
    "memfd": "os.memfd_create('x')",
    "System V segment": "assert libc.shmget(0, 1 << 26, 0o1600) < 0; raise OSError(ctypes.get_errno(), 'shmget')",
    "namespaces of its own": "assert libc.unshare(0x10020000) < 0; raise OSError(ctypes.get_errno(), 'unshare')",
    "Unix socket": "socket.socket(socket.AF_UNIX).connect(path)",
    "pair of datagram sockets": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', path)",
}


@pytest.mark.parametrize("kind", ATTEMPTS)
@pytest.mark.usefixtures("whole_sandbox")
def test_a_program_gets_no_memory_that_is_not_counted_and_no_socket_of_the_host(kind: str, tmp_path: Path):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        start = f"import ctypes, os, socket\nlibc, path = ctypes.CDLL(None, use_errno=True), {str(path)!r}\n"
        result = run_python(start + ATTEMPTS[kind])
    assert result.stderr.splitlines()[-1].startswith("PermissionError: [Errno 1]"), result


@pytest.mark.usefixtures("whole_sandbox")
def test_a_program_works_with_processes_threads_and_an_event_loop_of_its_own():
    code = (
        "import asyncio, subprocess, sys, threading\n"
        "async def main():\n    child = await asyncio.create_subprocess_exec(sys.executable, '-c', 'print(7)', stdout=-1)\n"
        "    return (await child.communicate())[0]\n"
        "threading.Thread(target=print, args=('thread',)).start()\nprint(asyncio.run(main()))\n"
    )
    result = run_python(code, timeout_s=60)
    assert sorted(result.stdout.splitlines()) == ["b'7\\n'", "thread"], result


SEES = """
import os
print(sorted(os.listdir("/proc")) and [open(f"/proc/{n}/cmdline").read() for n in os.listdir("/proc") if n.isdigit()])
"""


@pytest.mark.usefixtures("whole_sandbox")
def test_a_program_sees_no_process_of_the_host():
    with subprocess.Popen(["sleep", "600.125"]) as other:
        result = run_python(SEES)
        other.kill()
    assert result.exit_code == 0 and "600.125" not in result.stdout, result


@pytest.mark.usefixtures("whole_sandbox")
def test_a_sandbox_of_an_ordinary_user_holds_the_same():
    """The program keeps that user's rights over files, and nothing else of the host."""
    setpriv = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c"]
    starts = "import headrace, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    if (
        shutil.which("setpriv") is None
        or subprocess.run([*setpriv, starts], capture_output=True, check=False).returncode
    ):
        pytest.skip("another user cannot run this Python, or this user cannot become another one")
    code = "import os, socket\nfor f in (os.memfd_create, socket.socket):\n    try: f(*(['x'] if f is os.memfd_create else [1]))\n"
    code += "    except OSError: print('refused')\nprint([n for n in os.listdir('/proc') if n.isdigit()])"
    ask = f"from headrace.rollout.rewards.sandbox import run_python; print(run_python({code!r}))"
    answer = subprocess.run([*setpriv, ask], check=True, capture_output=True, text=True, timeout=200).stdout
    if "weakness=''" not in answer:
        pytest.skip(f"this host gives another user no whole sandbox: {answer}")
    assert "refused\\nrefused\\n['1']" in answer or "refused\\nrefused\\n[]" in answer
