import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.comm.errors import LinkBroken, SettingError
from headrace.comm.links import MemoryLink, PacedLink, open_link
from headrace.comm.store import StoreServer, connect_store
from headrace.comm.waits import waiting

SECRET = b"a secret of the run"


def open_pair(backend, address, name, secrets=(SECRET, SECRET), deadline_s=10):
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(open_link, backend, address, name, end, deadline_s, secret=secrets[end]) for end in (0, 1)]
        return [end.result() for end in ends]


@pytest.fixture(scope="module")
def store():
    return StoreServer("127.0.0.1")


@pytest.fixture(params=["tcp", "staged", "memory"])
def pair(request, store):
    name = request.node.name
    ends = MemoryLink.pair() if request.param == "memory" else open_pair(request.param, store.address, name)
    yield ends
    for end in ends:
        end.close()


def noise(num_bytes):
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)


def test_bytes_arrive_as_they_were_sent_in_both_directions(pair):
    for sender, receiver in (pair, pair[::-1]):
        sent = [noise(size) for size in (1, 0, 4097, 3_000_001, 20_000_003)]  # the last one needs several buckets
        received = [np.zeros_like(piece) for piece in sent]
        with ThreadPoolExecutor(1) as pool:
            sending = [pool.submit(sender.send, piece, 10) for piece in sent]
            for piece in received:
                receiver.receive(piece, 10)
            for done in sending:
                done.result()
        assert all(np.array_equal(a, b) for a, b in zip(sent, received, strict=True))


def test_a_read_only_buffer_can_be_sent(pair):
    frozen = np.frombuffer(b"frozen bytes", dtype=np.uint8)
    received = np.zeros(12, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(pair[0].send, frozen, 10)
        pair[1].receive(received, 10)
        sending.result()
    assert received.tobytes() == b"frozen bytes"


def test_a_silent_neighbour_breaks_the_link_at_the_deadline(pair):
    started = time.monotonic()
    with pytest.raises(LinkBroken):
        pair[1].receive(np.zeros(8, np.uint8), 0.2)
    assert 0.15 < time.monotonic() - started < 3


def test_a_neighbour_that_closes_is_noticed(pair):
    pair[0].close()
    with pytest.raises(LinkBroken):
        pair[1].receive(np.zeros(8, np.uint8), 2)
    pair[0].close()


@pytest.mark.parametrize("backend", ["tcp", "staged"])
def test_an_end_without_the_secret_is_turned_away(store, backend):
    with pytest.raises(LinkBroken):
        open_pair(backend, store.address, f"forged {backend}", secrets=(SECRET, b"guess"), deadline_s=1)


def test_an_end_whose_other_never_comes_says_so(store):
    with pytest.raises(LinkBroken, match="lonely"):
        open_link("tcp", store.address, "lonely", 0, 0.2)


def test_a_stranger_on_the_port_does_not_keep_the_neighbour_out(store):
    import socket

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(open_link, "tcp", store.address, "busy", 0, 10, secret=SECRET)
        client = connect_store(store.address, 5)
        with waiting("the listening end", "its address", 5) as wait:
            wait.until(lambda: client.check(["link/busy"]))
        host, port = client.get("link/busy").decode().split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"x" * 48)
        other = open_link("tcp", store.address, "busy", 1, 10, secret=SECRET)
        listening.result().close()
        other.close()


@pytest.mark.parametrize("backend", ["pigeon", "gloo"])
def test_an_unknown_back_end_is_a_users_mistake(store, backend):
    with pytest.raises(SettingError, match="comm.link"):
        open_link(backend, store.address, "x", 0, 1)


KILLED = """
import sys, numpy as np
from headrace.comm.links import open_link
link = open_link("tcp", sys.argv[1], "killed", 1, 10)
link.send(np.zeros(1000, np.uint8), 10)
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_neighbour_killed_in_the_middle_of_a_message_is_noticed_at_once(store):
    command = [sys.executable, "-c", KILLED, store.address]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    link = open_link("tcp", store.address, "killed", 0, 20)
    assert child.stdout and child.stdout.readline() == b"sent\n"
    killed_at = [0.0]

    def kill():
        killed_at[0] = time.monotonic()
        child.kill()

    threading.Timer(0.1, kill).start()
    with pytest.raises(LinkBroken):
        link.receive(np.zeros(2000, np.uint8), 20)
    assert killed_at[0] and time.monotonic() - killed_at[0] < 0.5
    child.communicate()


def test_a_paced_link_keeps_to_its_pace():
    near, far = MemoryLink.pair()
    paced = PacedLink(near, bytes_per_s=10e6)
    started = time.monotonic()
    for _ in range(20):
        paced.send(np.zeros(100_000, np.uint8), 5)
    assert time.monotonic() - started > 0.19
    far.receive(np.zeros(2_000_000, np.uint8), 5)
