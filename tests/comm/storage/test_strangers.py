"""A storage unit's port in front of programs that are not of the run."""

import resource
import secrets
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.server import MOST_STRANGERS, StorageServer
from headrace.comm.waits import waiting


@pytest.fixture
def unit():
    unit = StorageServer("127.0.0.1", b"secret").start()
    yield unit
    unit.close()


def test_random_bytes_end_their_own_connection_alone(unit):
    client = StorageClient(unit.address, b"secret")
    address = ("127.0.0.1", int(unit.address.rpartition(":")[2]))
    for length in (0, 1, 15, 16, 47, 48, 200, 5000):
        with socket.create_connection(address) as stranger:
            stranger.sendall(secrets.token_bytes(length))
    client.put("row", {"x": np.arange(3)})
    assert client.get("row")["x"].tolist() == [0, 1, 2]
    client.close()


def test_of_a_crowd_of_silent_connections_the_oldest_leave_and_clients_are_served(unit):
    host, _, port = unit.address.rpartition(":")
    before, crowd = threading.active_count(), list[socket.socket]()
    try:
        for _ in range(MOST_STRANGERS + 100):
            crowd.append(socket.create_connection((host, int(port))))
        client = StorageClient(unit.address, b"secret", deadline_s=60)
        client.put("row", {"x": np.arange(3)})
        assert client.get("row")["x"].tolist() == [0, 1, 2]
        client.close()
        crowd[0].settimeout(60)
        while crowd[0].recv(64):  # the unit's half of the hand-shake
            pass
        with waiting("the unit", "the threads of those that have left", 60) as wait:
            wait.until(lambda: threading.active_count() - before <= MOST_STRANGERS + 1)
    finally:
        for each in crowd:
            each.close()


CROWD = """
import resource, socket, sys
import numpy as np
from headrace.comm.storage.client import StorageClient
from headrace.comm.storage.server import StorageServer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
unit = StorageServer("127.0.0.1", b"secret").start()
host, _, port = unit.address.rpartition(":")
crowd = []
try:
    while True:
        crowd.append(socket.create_connection((host, int(port))))
except OSError:  # no descriptor is left, neither here nor for the unit's next client
    pass
for each in crowd:
    each.close()
client = StorageClient(unit.address, b"secret", deadline_s=60)
client.put("row", {"x": np.arange(3)})
print(client.get("row")["x"].tolist())
client.close()
unit.close()
"""


def test_a_unit_without_free_descriptors_serves_again_when_the_crowd_has_left():
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    result = subprocess.run([sys.executable, "-c", CROWD], check=False, capture_output=True, text=True, timeout=120)
    assert result.stdout == "[0, 1, 2]\n", result.stderr
