"""The end of a role's process."""

import subprocess
import sys

import pytest

FAILED = """
import sys, threading, torch
from headrace.launch.processes.role_process import end_process

computing = threading.Event()

def compute():
    matrix = torch.eye(300)
    while True:
        matrix = matrix @ matrix
        computing.set()

threading.Thread(target=compute, daemon=True).start()
computing.wait(60)
print("the last word")
end_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_role_that_leaves_a_thread_inside_torch_ends_with_its_own_exit_code(code: int):
    """Without `end_process` it ends by SIGABRT: "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", FAILED, str(code)], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "the last word\n", "")
