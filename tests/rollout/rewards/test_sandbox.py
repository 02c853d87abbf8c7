"""A program in the sandbox gives its output and its exit code, and nothing that it does outlives it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.rollout.rewards import sandbox
from headrace.rollout.rewards.sandbox import SandboxError, SandboxResult, run_python

SHOW = "import os, sys, time\nprint(__file__, flush=True)\n"


def leaves_nothing(result: SandboxResult) -> bool:
    """Whether the directory that the program printed is gone, and every process of it ends within a minute."""
    program = result.stdout.splitlines()[0]
    deadline = time.monotonic() + 60
    while (is_left := any(program in text for text in command_lines())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_left and not Path(program).parent.exists()


def command_lines() -> list[str]:
    lines: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text())
        except OSError:  # it has ended meanwhile
            continue
    return lines


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (apt-get install bubblewrap)")
    if weakness := run_python("").weakness:
        pytest.skip(f"this host gives no namespaces: {weakness}")


def test_a_program_gives_its_output_its_errors_and_its_exit_code():
    code = "import sys\nprint(int(input()) * 2)\nprint('é', file=sys.stderr)\nsys.exit(3)"
    assert run_python(code, "21\n") == SandboxResult(3, "42\n", "é\n")
    assert "ZeroDivisionError" in run_python("1 / 0").stderr
    assert run_python("import subprocess, sys\nsys.exit(subprocess.call(['true']))").exit_code == 0


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "while True:\n    try:\n        os.fork() or os.setsid()\n    except OSError:\n        pass",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    ],
    ids=["fork bomb", "fork bomb of sessions", "ignored signals"],
)
def test_a_program_without_end_is_killed_with_all_its_processes(code: str):
    result = run_python(SHOW + code, timeout_s=4)
    assert result.exit_code in (None, 128 + 9, 128 + 24) and leaves_nothing(result)


def test_a_process_that_a_program_leaves_behind_ends_with_it():
    daemon = "if os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    os.fork() or time.sleep(1000)\n    time.sleep(1000)"
    result = run_python(SHOW + daemon, timeout_s=60)
    assert result.exit_code == 0 and leaves_nothing(result)


def test_output_is_cut_and_the_program_goes_on():
    code = SHOW + "for _ in range(1 << 10): sys.stdout.write('x' * (1 << 20)); sys.stderr.write('y' * 1000)"
    result = run_python(code, max_output=1000, timeout_s=100)
    assert result.exit_code == 0 and len(result.stdout) == len(result.stderr) == 1000


def test_a_program_writes_only_to_its_own_small_directory(tmp_path: Path):
    tmp_path.chmod(0o777)
    attempts = [str(tmp_path / "file"), "/tmp/file-of-sandbox", "/dev/shm/file-of-sandbox", "/etc/file-of-sandbox"]
    code = (
        f"for path in {attempts!r}:\n    try: open(path, 'w')\n    except OSError: print('refused')\n"
        "open('own', 'w').write('x')\ntry:\n    for i in range(40): open(f'big{i}', 'wb').write(bytes(1 << 20))\n"
        "except OSError as error: print('full', i)\n"
    )
    result = run_python(SHOW + code, disk_mb=8)
    assert result.stdout.splitlines()[1:5] == ["refused"] * 4 and result.stdout.splitlines()[5].startswith("full")
    assert leaves_nothing(result) and not any(map(Path.exists, map(Path, attempts)))


def test_a_program_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        assert "ConnectionRefusedError" in run_python(code).stderr


def test_memory_is_bounded():
    assert "MemoryError" in run_python("x = bytearray(1 << 30)", memory_mb=256).stderr


def test_a_program_runs_where_root_is_the_only_user_as_in_some_containers():
    ask = "from headrace.rollout.rewards.sandbox import run_python; print(run_python('import os; print(os.getuid() > 0)'))"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", ask]
    try:
        subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this host gives no user namespace: {error}")
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    assert answer.strip() == str(SandboxResult(0, "True\n", ""))


def test_a_program_that_cannot_be_started_is_an_error_of_the_host_and_not_a_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/usr/bin/no-python")
    with pytest.raises(SandboxError, match="no-python"):
        run_python("print(1)")


def test_without_bubblewrap_the_limits_hold_and_each_result_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox, "_isolation", sandbox._tried)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    result = run_python("import os\nprint(os.getcwd() == os.environ['HOME'])\nos.memfd_create('x')")
    assert "bwrap" in result.weakness and result.stdout == "True\n" and "PermissionError" in result.stderr
    assert "MemoryError" in run_python("x = bytearray(1 << 30)", memory_mb=256).stderr
    left_behind = run_python(
        SHOW + "if os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(1000)"
    )
    assert left_behind.exit_code == 0 and leaves_nothing(left_behind)


def test_without_bubblewrap_root_starts_no_program_as_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox, "_isolation", sandbox._tried)
    monkeypatch.setattr(sandbox, "_free_user", lambda: 1 << 21)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_uncovered", lambda: ["--tmpfs", "/root"])
    with pytest.raises(SandboxError, match="other users cannot reach"):
        run_python("print(1)")
