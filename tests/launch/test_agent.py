"""The launcher's torchrun."""

import signal
import subprocess
import sys

from headrace.launch.processes.agent import send_signal


def test_a_signal_reaches_the_others_where_one_process_has_ended_already():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as alive:
        send_signal([ended.pid, alive.pid], signal.SIGKILL)
        assert alive.wait(60) == -signal.SIGKILL
