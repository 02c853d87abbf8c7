"""Links over every back end: bytes, deadlines, dead and forged ends, and the limit of their speed."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryLink
from support.throttled_link import ThrottledLink

from headrace.comm.errors import LinkBroken, SettingError
from headrace.comm.links import staged
from headrace.comm.links.opening import open_link
from headrace.comm.links.process_group import meeting_store
from headrace.comm.links.process_group import open_pair as open_pair_group
from headrace.comm.links.staged import StagedLink
from headrace.comm.links.tls import TlsIdentity
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer

SECRET = b"a secret of the run"
PATIENCE_S = 60.0


@dataclass
class Clock:
    """Time passes only in `sleep`."""

    oversleeps_s: float = 0.0
    now: float = 0.0

    def sleep(self, seconds):
        self.now += seconds + self.oversleeps_s


def connected(address):
    client = StoreClient.connect(address, SECRET, PATIENCE_S)
    at_end(client.close)
    return client


def open_pair(backend, address, name, secrets=(SECRET, SECRET), deadline_s=PATIENCE_S, tls=False):
    def open_end(end):
        identity = TlsIdentity() if tls else None
        return open_link(backend, connected(address), name, end, deadline_s, secret=secrets[end], tls=identity)

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(open_end, end) for end in (0, 1)]
        return [end.result() for end in ends]


@pytest.fixture(scope="module")
def store():
    server = StoreServer("127.0.0.1", SECRET).start()
    yield server
    server.close()


@pytest.fixture(params=["tcp", "tls", "staged", "memory"])
def pair(request, store):
    name, backend = request.node.name, request.param.replace("tls", "tcp")
    is_tls = request.param == "tls"
    ends = MemoryLink.pair() if backend == "memory" else open_pair(backend, store.address, name, tls=is_tls)
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
            sending = [pool.submit(sender.send, piece, PATIENCE_S) for piece in sent]
            for piece in received:
                receiver.receive(piece, PATIENCE_S)
            for done in sending:
                done.result()
        assert all(np.array_equal(a, b) for a, b in zip(sent, received, strict=True))


def test_a_staged_link_copies_and_sends_on_a_stream_of_its_own(store, monkeypatch):
    inside, outside = list[str](), list[str]()
    here = threading.local()

    @contextmanager
    def stream():
        here.is_inside = True
        yield
        here.is_inside = False

    def note(owner, name):
        function = getattr(owner, name)

        def noted(*args, **kwargs):
            (inside if getattr(here, "is_inside", False) else outside).append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(staged, "stream_of_link", lambda device: stream)
    note(StagedLink, "_broadcast")
    note(torch.Tensor, "copy_")
    sender, receiver = open_pair("staged", store.address, "streams")
    sent = noise(20_000_003)
    received = np.zeros_like(sent)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, sent, PATIENCE_S)
        receiver.receive(received, PATIENCE_S)
        sending.result()
    sender.close()
    receiver.close()
    assert np.array_equal(sent, received)
    assert {"_broadcast", "copy_"} == set(inside) and not outside


def test_a_read_only_buffer_can_be_sent(pair):
    frozen = np.frombuffer(b"frozen bytes", dtype=np.uint8)
    received = np.zeros(12, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(pair[0].send, frozen, PATIENCE_S)
        pair[1].receive(received, PATIENCE_S)
        sending.result()
    assert received.tobytes() == b"frozen bytes"


def test_a_silent_neighbour_breaks_the_link_at_the_deadline(pair):
    with pytest.raises(LinkBroken, match=r"before the deadline|[Tt]imed out"):
        pair[1].receive(np.zeros(8, np.uint8), 0.2)


def test_a_neighbour_that_closes_is_noticed(pair):
    pair[0].close()
    with pytest.raises(LinkBroken):
        pair[1].receive(np.zeros(8, np.uint8), PATIENCE_S)
    pair[0].close()


class StuckGroup:
    """A group of NCCL whose other end is dead: a broadcast starts, or blocks, and never ends."""

    def __init__(self, blocks: bool) -> None:
        self.freed = threading.Event()
        self.blocks = blocks
        self.num_broadcasts = self.num_aborts = 0

    def broadcast(self, tensors, options):
        self.num_broadcasts += 1
        if self.blocks:
            self.freed.wait(PATIENCE_S)
        return SimpleNamespace(is_completed=lambda: False)

    def abort(self):
        self.num_aborts += 1


@pytest.fixture
def control_pair(store, request):
    ends = open_pair("tcp", store.address, request.node.name)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("direction", ["send", "receive"])
def test_over_nccl_the_socket_tells_of_a_dead_neighbour_long_before_the_deadline(control_pair, direction):
    group = StuckGroup(blocks=False)
    link = StagedLink("nccl", cast(Any, group), 0, torch.device("cpu"), control_pair[0])
    control_pair[1].close()
    with pytest.raises(LinkBroken, match="closed by the other end"):
        getattr(link, direction)(np.zeros(100_000, np.uint8), 3600)
    assert group.num_broadcasts == group.num_aborts == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("blocks", [True, False])
def test_an_end_that_dies_while_nccl_connects_breaks_the_link_though_nccl_waits_for_ever(control_pair, blocks):
    group = StuckGroup(blocks)
    link = StagedLink("nccl", cast(Any, group), 1, torch.device("cpu"), control_pair[0])
    control_pair[1].close()
    with pytest.raises(LinkBroken):
        link.connect(3600)
    group.freed.set()


def test_a_staged_link_is_connected_before_its_first_bytes_have_a_deadline(store):
    ends = open_pair("staged", store.address, "connected")
    groups: list[Any] = [end._group for end in ends if isinstance(end, StagedLink)]
    assert [group._get_sequence_number_for_group() for group in groups] == [1, 1]
    for end in ends:
        end.close()


@pytest.mark.parametrize("set_by_user", ["1", None])
def test_a_group_of_nccl_is_made_so_that_an_error_breaks_the_link_and_not_the_process(store, monkeypatch, set_by_user):
    seen = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_):
            seen.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])

    if set_by_user is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", set_by_user)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    open_pair_group("nccl", connected(store.address), "made", 0, PATIENCE_S, "127.0.0.1")
    assert seen == ["2"] and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == set_by_user


@pytest.mark.parametrize(("backend", "tls"), [("tcp", False), ("tcp", True), ("staged", False)])
def test_an_end_without_the_secret_gets_no_link(store, backend, tls):
    with pytest.raises(LinkBroken):
        open_pair(backend, store.address, f"forged {backend} {tls}", secrets=(SECRET, b"guess"), deadline_s=1, tls=tls)


def test_an_end_whose_other_end_never_comes_raises_an_error_that_names_the_link(store):
    with pytest.raises(LinkBroken, match="lonely"):
        open_link("tcp", connected(store.address), "lonely", 0, 0.2)


def test_a_foreign_connection_to_the_port_does_not_keep_the_other_end_out(store):

    with ThreadPoolExecutor(1) as pool:
        client = connected(store.address)
        listening = pool.submit(open_link, "tcp", connected(store.address), "busy", 0, PATIENCE_S, secret=SECRET)
        host, port = client.wait_for("link/busy", PATIENCE_S).decode().split(":")
        with socket.create_connection((host, int(port))) as foreign:
            foreign.sendall(b"x" * 48)
        other = open_link("tcp", client, "busy", 1, PATIENCE_S, secret=SECRET)
        listening.result().close()
        other.close()


@pytest.mark.parametrize("backend", ["udp", "gloo"])
def test_an_unknown_back_end_is_a_users_mistake(store, backend):
    with pytest.raises(SettingError, match="comm.link"):
        open_link(backend, connected(store.address), "x", 0, 1)


KILLED = """
import sys, numpy as np
from headrace.comm.links.opening import open_link
from headrace.comm.store.client import StoreClient
link = open_link("tcp", StoreClient.connect(sys.argv[1], b"a secret of the run", 60), "killed", 1, 60)
link.send(np.zeros(1000, np.uint8), 60)
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_neighbour_killed_in_the_middle_of_a_message_is_noticed_at_once(store):
    command = [sys.executable, "-c", KILLED, store.address]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    at_end(child.kill)
    link = open_link("tcp", connected(store.address), "killed", 0, PATIENCE_S)
    assert child.stdout and child.stdout.readline() == b"sent\n"
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(link.receive, np.zeros(2000, np.uint8), PATIENCE_S)
        child.kill()
        with pytest.raises(LinkBroken, match="closed by the other end|reset"):  # not at the deadline
            receiving.result()
    child.communicate()


def test_a_throttled_link_keeps_to_its_limit():
    near, far = MemoryLink.pair()
    clock = Clock()
    throttled = ThrottledLink(near, 10e6, now=lambda: clock.now, sleep=clock.sleep)
    for _ in range(20):
        throttled.send(np.zeros(100_000, np.uint8), 5)
    assert clock.now == pytest.approx(0.2, abs=0.002)
    far.receive(np.zeros(2_000_000, np.uint8), 5)


def test_a_throttled_link_makes_up_for_a_sleep_that_was_too_long():
    near, _ = MemoryLink.pair()
    clock = Clock(oversleeps_s=0.001)
    throttled = ThrottledLink(near, 10e6, now=lambda: clock.now, sleep=clock.sleep)
    for _ in range(20):
        throttled.send(np.zeros(100_000, np.uint8), 5)
    assert clock.now == pytest.approx(0.2, abs=0.003)


def test_the_first_rank_of_a_group_that_died_after_it_gave_its_address_is_not_awaited_for_ever():
    server = StoreServer("127.0.0.1", SECRET).start()
    at_end(server.close)
    store = connected(server.address)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("group/a", f"127.0.0.1:{port}".encode())
    with pytest.raises(LinkBroken, match="group a: its first rank does not answer"):
        meeting_store(store, "127.0.0.1", "a", deadline_s=1.0, is_host=False)
