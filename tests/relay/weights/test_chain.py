"""The chain of relays: its order, its chunk sizes, transfers down the chain, and relays that die in the middle of one."""

import itertools
import threading
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.timed_link import Clock, TimedLink

from headrace.comm.fleet import Member
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.waits import waiting
from headrace.relay.weights import chain, server, transfer
from headrace.relay.weights.chain import chain_order, successor_of
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.transfer import best_num_chunks, chunk_bytes, push_seconds

PATIENCE_S = 60.0


def relay(index, incarnation=1, alive=True):
    return Member(f"relay-{index}", "relay", index, incarnation, "here", 1, {}, alive)


def test_relays_follow_each_other_by_index_and_those_that_came_back_join_at_the_tail():
    members = [relay(2), relay(0, incarnation=2), relay(1), relay(3, alive=False)]
    assert [m.index for m in chain_order(members)] == [1, 2, 0]


def test_the_successor_is_the_next_that_lives_and_is_not_suspected():
    members = [relay(index) for index in range(4)]
    assert successor_of(members[0], members, {}, now=0.0) == members[1]
    assert successor_of(members[0], members, {("relay-1", 1): 5.0}, now=0.0) == members[2]
    assert successor_of(members[0], members, {("relay-1", 1): 5.0}, now=6.0) == members[1]
    assert successor_of(members[0], [members[0], relay(1, alive=False), members[3]], {}, now=0.0) == members[3]
    assert successor_of(members[3], members, {}, now=0.0) is None


def test_the_best_number_of_chunks_is_best():
    nodes, num_bytes, byte_s, start_s = 12, 1e9, 1 / 1e9, 1e-4
    best = best_num_chunks(nodes, num_bytes, byte_s, start_s)
    at_best = push_seconds(nodes, num_bytes, best, byte_s, start_s)
    assert all(
        at_best <= push_seconds(nodes, num_bytes, k, byte_s, start_s) for k in (best / 2, best - 1, best + 1, best * 2)
    )
    assert at_best < 1.15 * num_bytes * byte_s


def test_the_papers_largest_case_comes_out():
    """72B in bf16, 127 relays and the trainer's, at 90 GB/s effective: about 1.6 s."""
    num_bytes, byte_s, start_s = 2 * 72e9, 1 / 90e9, 5e-6
    best = best_num_chunks(128, num_bytes, byte_s, start_s)
    assert push_seconds(128, num_bytes, best, byte_s, start_s) == pytest.approx(1.6, rel=0.05)


def test_a_pair_needs_no_chunks_and_chunks_stay_within_what_links_carry_well():
    assert chunk_bytes(2, 1 << 30, 1e-9, 1e-4) == 32 << 20
    assert chunk_bytes(128, 1 << 20, 1e-9, 1e-6) == 64 << 10


def test_a_timed_link_carries_one_piece_after_the_other():
    near, far = Clock(1.0), Clock()
    link = TimedLink(near, far, start_s=0.5, byte_s=0.1)
    for value in (3, 4):
        link.send(np.full(10, value, np.uint8))
    piece = np.zeros(10, np.uint8)
    link.receive(piece)
    assert piece[0] == 3 and far.now == 2.5
    link.receive(piece)
    assert piece[0] == 4 and far.now == 4.0 and near.now == 1.0


def seconds_down_the_line(num_nodes, num_bytes, num_chunks, byte_s, start_s):
    """Seconds until the last node has everything, when each node sends on the pieces that it received."""
    clocks = [Clock() for _ in range(num_nodes)]
    links = [TimedLink(near, far, start_s, byte_s) for near, far in itertools.pairwise(clocks)]
    version = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    chunks = np.array_split(version, num_chunks)
    for chunk in chunks:
        links[0].send(chunk)
    for upstream, downstream in itertools.pairwise(links):
        for chunk in chunks:
            piece = np.empty_like(chunk)
            upstream.receive(piece)
            downstream.send(piece)
    received = [np.empty_like(chunk) for chunk in chunks]
    for piece in received:
        links[-1].receive(piece)
    assert np.array_equal(np.concatenate(received), version)
    return clocks[-1].now


@pytest.mark.parametrize("num_nodes", [2, 12, 128])
@pytest.mark.parametrize("num_chunks", [1, 16, 200])
def test_chains_of_any_length_take_the_time_of_the_model(num_nodes, num_chunks):
    num_bytes, byte_s, start_s = 200_000, 1e-8, 2e-6
    taken = seconds_down_the_line(num_nodes, num_bytes, num_chunks, byte_s, start_s)
    assert taken == pytest.approx(push_seconds(num_nodes, num_bytes, num_chunks, byte_s, start_s), rel=0.05)


def test_the_papers_72b_reaches_127_relays_in_the_papers_time():
    """At 90 GB/s effective and chunks of 32 MB, 144 GB in 4,500 chunks; a byte of the test stands for a megabyte."""
    taken = seconds_down_the_line(128, 144_000, 4_500, 1e6 / 90e9, 5e-6)
    assert taken == pytest.approx(1.65, rel=0.05)


class Gate:
    """Holds back all bytes beyond a number of them, until it is opened."""

    def __init__(self):
        self.changed = threading.Condition()
        self.num_bytes = float("inf")

    def hold_beyond(self, num_bytes):
        with self.changed:
            self.num_bytes = num_bytes
            self.changed.notify_all()

    def open(self):
        self.hold_beyond(float("inf"))

    def take(self, num_bytes):
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_bytes >= num_bytes, PATIENCE_S)
            self.num_bytes -= num_bytes


class GatedLink:
    """A link that sends through a gate."""

    def __init__(self, link, gate):
        self.backend, self.receive, self.close = link.backend, link.receive, link.close
        self.link, self.gate = link, gate

    def send(self, buffer, deadline_s):
        self.gate.take(buffer.nbytes)
        self.link.send(buffer, deadline_s)


class GatedFleet(MemoryFleet):
    """A member whose links all send through one gate."""

    gate: Gate

    def open_link(self, name, end, deadline_s, backend="tcp"):
        return GatedLink(super().open_link(name, end, deadline_s, backend), self.gate)


class Relays:
    """A chain in memory, and an actor that sends to its head through a gate."""

    def __init__(self, count):
        self.settings = CommSettings(link="tcp")
        chunks = patch.object(transfer, "CHUNK_RANGE", (64 << 10, 64 << 10))
        chunks.start()
        at_end(chunks.stop)
        self.network = MemoryNetwork()
        self.tensors = {"w": torch.arange(1_000_000, dtype=torch.float32)}
        self.layout = Layout.of(self.tensors, "float32")
        self.segments = [Segment.create_anonymous() for _ in range(count)]
        self.fleets = [self.join("relay", i, {"segment": s.path}) for i, s in enumerate(self.segments)]
        self.servers = [
            WeightServer(f, s, self.settings).start() for f, s in zip(self.fleets, self.segments, strict=True)
        ]
        actor = GatedFleet(self.network, self.join("actor", 0, {}).me, self.settings)
        self.gate = actor.gate = Gate()
        self.publisher = WeightPublisher(actor, self.layout, self.settings).start()
        at_end(self.close)

    def join(self, role, index, info):
        return MemoryFleet.join_network(self.network, role, index, info, self.settings)

    def publish(self, version):
        self.publisher.publish(version, {"w": self.tensors["w"] + version})

    def arrived(self, index, version):
        """Bytes of a version that have reached a relay while it still arrives."""
        incoming = self.servers[index].version_store.incoming
        return incoming.bytes_ready if incoming is not None and incoming.offer.version == version else 0

    def wait_until_all_have(self, version, of):
        with waiting("the chain", f"version {version}", PATIENCE_S) as wait:
            wait.until(lambda: all(self.servers[index].newest == version for index in of))

    def publish_half(self, version):
        """Publish a version of which the actor holds back one half; returns once a third has reached every relay."""
        self.gate.hold_beyond(self.layout.num_bytes // 2)
        self.publish(version)
        with waiting("the chain", f"a third of version {version}", PATIENCE_S) as wait:
            third = self.layout.num_bytes // 3
            wait.until(lambda: all(self.arrived(index, version) > third for index in range(len(self.servers))))

    def kill(self, index):
        self.fleets[index].crash()
        self.servers[index].close()

    def bytes_at(self, index):
        held, into = self.servers[index].version_store.slots.read_with(np.copy)
        return held.version, self.layout.digest(into), held.digest

    def close(self):
        self.gate.open()
        for thing in (self.publisher, *self.servers, *self.segments):
            thing.close()


def test_the_last_relay_has_a_part_of_a_version_before_the_first_has_it_whole():
    relays = Relays(4)
    relays.publish(1)
    relays.wait_until_all_have(1, range(4))
    relays.publish_half(2)
    assert [each.newest for each in relays.servers] == [1] * 4
    relays.gate.open()
    relays.wait_until_all_have(2, range(4))


def test_a_relay_that_lives_but_takes_nothing_is_passed_over_and_those_after_it_have_the_version(monkeypatch):
    monkeypatch.setattr(server, "SILENCE_S", 1.0)
    relays = Relays(3)
    relays.servers[1].close()  # its process still beats
    relays.publish(1)
    relays.wait_until_all_have(1, (0, 2))


@pytest.mark.parametrize("kill", [0, 1, 3])
def test_a_relay_that_dies_in_the_middle_of_a_push_costs_the_others_neither_bytes_nor_a_timeout(kill, monkeypatch):
    for module in (transfer, server, chain):
        monkeypatch.setattr(module, "SILENCE_S", 10 * PATIENCE_S)
    relays = Relays(4)
    relays.publish(1)
    relays.wait_until_all_have(1, range(4))
    relays.publish_half(2)
    relays.kill(kill)
    relays.gate.open()
    survivors = [index for index in range(4) if index != kill]
    relays.wait_until_all_have(2, survivors)
    states = [relays.bytes_at(index) for index in survivors]
    assert {version for version, _, _ in states} == {2}
    assert len({digest for _, *digests in states for digest in digests}) == 1
    if kill in (0, 1):
        assert sum(relays.servers[index].version_store.num_resumed for index in survivors) >= 1
