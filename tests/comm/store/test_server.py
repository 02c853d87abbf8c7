"""The store's server and process: strangers, wrong secrets, dead and frozen clients, many at once."""

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.closing import at_end, hang_up

from headrace.comm.errors import StoreGone
from headrace.comm.frames import encode_message
from headrace.comm.links.handshake import NONCE_BYTES, PROOF_BYTES
from headrace.comm.links.host import split_address
from headrace.comm.links.tls import TlsIdentity
from headrace.comm.store import server as server_module
from headrace.comm.store.client import StoreClient
from headrace.comm.store.members import Member
from headrace.comm.store.protocol import Changed, Join, Post, Watch
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting

SECRET = b"a secret of the run"
PATIENCE_S = 60.0


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1", SECRET).start()
    at_end(server.close)
    return server


def connect(address: str, **more) -> StoreClient:
    client = StoreClient.connect(address, SECRET, PATIENCE_S, **more)
    at_end(client.close)
    return client


def join(client: StoreClient, index: int = 0, expiry_s: float = PATIENCE_S) -> None:
    member = Member(f"rollout-{index}", "rollout", index, 0, "here", 1, {})
    client.ask(lambda number: Join(number, member, expiry_s))


class Watcher:
    """A client that watches all roles."""

    def __init__(self, address: str):
        self.client = connect(address)
        self.changes: queue.SimpleQueue[Changed] = queue.SimpleQueue()
        self.alive: dict[str, bool] = {}
        self.client.on_changed = self.changes.put
        self.client.ask(lambda number: Watch(number, ""))

    def until(self, alive: dict[str, bool]) -> None:
        with waiting("the store", "a change", PATIENCE_S) as wait:
            while self.alive != alive:
                for member in self.changes.get(timeout=max(wait.remaining_s, 0.01)).members:
                    self.alive[member.name] = member.is_alive


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_client_without_the_secret_gets_no_connection_and_others_go_on(is_encrypted):
    server = StoreServer("127.0.0.1", SECRET, tls=TlsIdentity() if is_encrypted else None).start()
    at_end(server.close)
    client = connect(server.address)
    with pytest.raises(StoreGone, match="does not know the run's secret"):
        StoreClient.connect(server.address, b"another", PATIENCE_S)
    client.set("key", b"value")
    assert connect(server.address).get("key") == b"value"


def test_a_client_that_wants_tls_takes_no_other_connection(server):
    with pytest.raises(StoreGone, match="does not encrypt"):
        StoreClient.connect(server.address, SECRET, PATIENCE_S, tls=TlsIdentity())


def test_a_program_between_client_and_store_that_turns_tls_off_is_refused():
    """The proofs hold for one TLS connection, so a store of theirs without TLS cannot pass them on."""
    server = StoreServer("127.0.0.1", SECRET, tls=TlsIdentity()).start()
    at_end(server.close)
    with socket.create_connection(split_address(server.address), PATIENCE_S) as theirs:
        assert theirs.recv(1) == b"T"
        theirs.sendall(b"x" * 48)
        assert theirs.recv(1000)[:1] != b"P"
    assert connect(server.address).get("key") is None


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 4096, b""])
def test_what_a_stranger_sends_costs_the_others_nothing(server, sent):
    client = connect(server.address)
    stranger = socket.create_connection(split_address(server.address), PATIENCE_S)
    at_end(lambda: hang_up(stranger))
    stranger.sendall(sent)
    client.set("key", b"value")
    assert client.get("key") == b"value"


def test_a_stranger_who_believes_the_server_and_has_a_wrong_proof_loses_the_connection(server):
    with socket.create_connection(split_address(server.address), PATIENCE_S) as stranger:
        stranger.sendall(b"n" * NONCE_BYTES + b"p" * PROOF_BYTES)
        while stranger.recv(1 << 12):  # the server's part of the handshake, then the end
            pass


def test_a_crowd_of_strangers_keeps_no_client_out(server, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 8)
    crowd = [socket.create_connection(split_address(server.address), PATIENCE_S) for _ in range(40)]
    for stranger in crowd:
        at_end(lambda stranger=stranger: hang_up(stranger))
    assert connect(server.address).get("key") is None
    assert len(server._strangers) <= 9


def test_all_members_of_a_run_may_come_at_once(monkeypatch):
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 0)
    server = StoreServer("127.0.0.1", SECRET, num_expected=8).start()
    at_end(server.close)
    for _ in range(8):
        stranger = socket.create_connection(split_address(server.address), PATIENCE_S)
        at_end(lambda stranger=stranger: hang_up(stranger))
        assert stranger.recv(1) == b"P"  # the server has admitted it
    assert len(server._strangers) == 8


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.2)
    server = StoreServer("127.0.0.1", SECRET).start()
    at_end(server.close)
    with socket.create_connection(split_address(server.address), PATIENCE_S) as stranger:
        stranger.settimeout(PATIENCE_S)
        with pytest.raises(ConnectionResetError):
            while stranger.recv(1000):
                pass
            raise ConnectionResetError  # an orderly end is one too


def test_a_client_that_sends_a_malformed_request_is_dead_and_the_others_go_on(server):
    watcher, other = Watcher(server.address), connect(server.address)
    join(other)
    watcher.until({"rollout-0": True})
    other._channel.send(b"\x01" * 64)
    watcher.until({"rollout-0": False})
    assert watcher.client.get("key") is None


def test_a_member_whose_message_arrives_slowly_is_not_silent(server):
    watcher, member = Watcher(server.address), connect(server.address, heartbeat_s=PATIENCE_S)
    join(member, expiry_s=2.0)
    watcher.until({"rollout-0": True})
    frame = encode_message(Post("relay-0", "rollout-0", 1, bytes(1000)))
    for begin in range(0, len(frame), len(frame) // 10):
        time.sleep(0.4)
        member._channel.send(frame[begin : begin + len(frame) // 10])
    assert watcher.client.get("key") is None
    assert watcher.changes.empty()


def test_a_hundred_members_that_die_at_once_are_seen_within_seconds_and_no_other(server):
    watcher = Watcher(server.address)
    mortals = [connect(server.address) for _ in range(100)]
    for index, mortal in enumerate(mortals):
        join(mortal, index)
    survivor = connect(server.address)
    join(survivor, 100)
    watcher.until({f"rollout-{index}": True for index in range(101)})
    began = time.monotonic()
    for mortal in mortals:
        mortal._channel.close()
    watcher.until({f"rollout-{index}": index == 100 for index in range(101)})
    assert time.monotonic() - began < PATIENCE_S / 2


MEMBER = """
import sys
from headrace.comm.store.members import Member
from headrace.comm.store.client import StoreClient
from headrace.comm.store.protocol import Join
client = StoreClient.connect(sys.argv[1], b"", 60, heartbeat_s=0.02, patience_s=float(sys.argv[2]))
client.ask(lambda number: Join(number, Member("rollout-0", "rollout", 0, 0, "here", 1, {}), 0.5))
client.on_gone = lambda error: print(error, flush=True)
print("joined", flush=True)
sys.stdin.readline()
"""


class Processes:
    """A store and a member in processes of their own."""

    def __init__(self, *flags: str, patience_s: float = PATIENCE_S):
        self.store = self.start("-m", "headrace.comm.store", *flags)
        assert self.store.stdout
        self.address = self.store.stdout.readline().split()[1]
        self.member = self.start("-c", MEMBER, self.address, str(patience_s))
        assert self.member.stdout and self.member.stdout.readline() == "joined\n"

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        at_end(process.communicate)
        at_end(process.kill)
        return process


def test_a_frozen_member_counts_as_dead_and_lives_again_when_it_goes_on():
    processes = Processes()
    member = processes.member
    client = StoreClient.connect(processes.address, b"", PATIENCE_S)
    at_end(client.close)
    changes: queue.SimpleQueue[Changed] = queue.SimpleQueue()
    client.on_changed = changes.put
    client.ask(lambda number: Watch(number, "rollout"))
    for number, is_alive in ((None, True), (signal.SIGSTOP, False), (signal.SIGCONT, True), (signal.SIGKILL, False)):
        if number is not None:
            os.kill(member.pid, number)
        while [each.is_alive for each in changes.get(timeout=PATIENCE_S).members] != [is_alive]:
            pass


def test_a_store_that_stood_still_counts_nobody_as_dead_and_one_that_is_frozen_for_too_long_is_gone():
    processes = Processes(patience_s=1.0)
    assert processes.member.stdout
    os.kill(processes.store.pid, signal.SIGSTOP)
    assert "has not answered for" in processes.member.stdout.readline()


def test_a_store_that_may_open_too_few_files_says_so_at_its_start():
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    command = [sys.executable, "-m", "headrace.comm.store", "--expect", "5000"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr == "the store needs an open file for each of 5000 processes, and its limit is 100 (ulimit -Hn)\n"
