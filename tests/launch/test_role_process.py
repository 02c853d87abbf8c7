"""The end of a role's process."""

import signal
import subprocess
import sys

import pytest
from support.closing import at_end

from headrace.comm.mailbox import StoreMailboxes
from headrace.comm.messages import CheckpointRequested, Interrupted
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer

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


INTERRUPTED = """
import os, signal, sys
from headrace.comm.mailbox import StoreMailboxes
from headrace.comm.store.client import StoreClient
from headrace.launch.processes.signals import SignalReporter

signals = SignalReporter("hub")
mailbox = StoreMailboxes(StoreClient.connect(sys.argv[1], b"", 60)).open("hub/worker")
signals.report_by(mailbox)
with mailbox._lock:  # as within a send
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
sys.stdin.readline()
"""


def test_a_signal_while_the_process_reports_another_one_stops_nothing():
    """A handler interrupts the main thread anywhere, so it must not wait for a lock that this thread holds."""
    server = StoreServer("127.0.0.1", b"").start()
    at_end(server.close)
    client = StoreClient.connect(server.address, b"", 60)
    at_end(client.close)
    hub = StoreMailboxes(client).open("hub")
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, server.address], stdin=subprocess.PIPE)
    at_end(process.communicate)
    at_end(process.kill)
    received = [envelope.message for _ in range(2) if (envelope := hub.receive(20))]
    assert CheckpointRequested() in received and Interrupted(signal.SIGTERM) in received
