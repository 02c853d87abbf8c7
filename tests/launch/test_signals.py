"""The signals that the launcher and the supervisors wait for."""

import signal
import subprocess
import sys

import pytest

from headrace.launch.processes.signals import blocked_signals

WITH_A_THREAD = """
import os, signal, sys, threading, time
from headrace.launch.processes.signals import block_signals, blocked_signals, wait_for_signal
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as a library's, it has blocked nothing
number = int(sys.argv[1])
with blocked_signals():
    os.kill(os.getpid(), number)
    time.sleep(0.1)  # the other thread takes it
    assert any(wait_for_signal(0.1) == number for _ in range(600))
block_signals()
os.kill(os.getpid(), number)
time.sleep(0.1)
assert any(wait_for_signal(0.1) == number for _ in range(600))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_signal_that_another_thread_could_take_reaches_the_wait(number: signal.Signals, handler: str):
    start = f"import signal\nsignal.signal(signal.SIGINT, signal.{handler})\n"
    command = [sys.executable, "-c", start + WITH_A_THREAD, str(int(number))]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_a_handler_that_is_not_pythons_stays(monkeypatch: pytest.MonkeyPatch):
    """Python could not set it again."""
    changed = set[int]()
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, handler: changed.add(number))
    with blocked_signals():
        pass
    assert changed == {signal.SIGINT, signal.SIGTERM}
