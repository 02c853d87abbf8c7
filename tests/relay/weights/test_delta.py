"""Versions as differences to older ones: the encoding, its two ends, and whole chains."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.messages.weights import Delta, Offer
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.tensor_split import TensorSplit
from headrace.comm.waits import waiting
from headrace.relay.weights.delta import DeltaCodec, DeltaSource, decode, encode
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.shards import ShardRun, WeightShard
from headrace.relay.weights.slots import VersionSlots


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([2, 4]), st.integers(1, 200_000))
def test_a_delta_turns_the_base_into_the_new_version_bit_for_bit(seed, share, width, num_elements):
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, num_elements * width, dtype=np.uint8)
    new = base.copy()
    touched = random.random(num_elements) < share**8  # mostly sparse, so that gaps beyond 16 bits occur
    new.view(f"u{width}")[touched] += 1
    changes = encode(base, new, width)
    places, values = decode(changes, width, num_elements)
    base.view(f"u{width}")[places] = values
    assert np.array_equal(base, new)
    assert changes.nbytes <= (touched.sum() + num_elements // 65_535 + 1) * (2 + width)


@pytest.mark.parametrize("gap", [65_535, 65_536, 65_537, 131_070, 131_071])
def test_a_delta_crosses_gaps_of_about_as_many_elements_as_16_bits_count(gap):
    base = np.zeros(2 * (gap + 1), np.uint8)
    new = base.copy()
    new.view("u2")[[0, gap]] = 7
    places, values = decode(encode(base, new, 2), 2, gap + 1)
    base.view("u2")[places] = values
    assert np.array_equal(base, new)


def test_equal_versions_have_an_empty_delta():
    base = np.zeros(1000, np.uint8)
    assert encode(base, base.copy(), 2).nbytes == 0


def test_a_delta_that_does_not_fit_the_base_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        decode(np.zeros(7, np.uint8), 2, 5)
    with pytest.raises(ValueError, match="does not fit"):
        decode(encode(np.zeros(100, np.uint8), np.ones(100, np.uint8), 2), 2, 5)


def test_a_version_is_offered_as_a_difference_only_where_that_is_less_than_half_of_it():
    source, old, new = DeltaSource(), np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    assert source.offer(1, old, 2) is None
    source.remember(1, old)
    new[:100] = 1
    difference = source.offer(2, new, 2)
    assert difference is not None and difference.delta.base == 1
    assert source.offer(1, new, 2) is None
    assert source.offer(2, new + 1, 2) is None


def test_a_part_whose_base_is_not_held_or_that_comes_again_comes_whole():
    segment, codec = Segment.create_anonymous(), DeltaCodec()
    slots = VersionSlots(segment)
    slots.prepare(1000, 5)
    offer = Offer(2, 1000, 5, delta=Delta(1, 8, 2))
    assert not codec.accept(offer, slots)
    slot = slots.begin(1)
    assert slot is not None
    slots.commit(slot, "0" * 32)
    assert codec.accept(offer, slots) and codec.covers([0])
    codec.forget(0)
    assert not codec.covers([0])
    del slot
    segment.close()


class Trained:
    """A bf16 model under Adam at a small learning rate, published at each step with deltas, two relays in a chain."""

    def __init__(self, delta):
        self.settings = CommSettings(link="tcp", heartbeat_s=0.02, delta=delta)
        self.network = MemoryNetwork()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(256, 256)
        self.model.weight.data.normal_(0, 0.02)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6)
        self.layout = Layout.of(dict(self.model.named_parameters()), "bfloat16")
        self.segments = [Segment.create_anonymous() for _ in range(2)]
        self.servers = [self.server(index, segment) for index, segment in enumerate(self.segments)]
        self.publisher = WeightPublisher(self.join("actor", 0, {}), self.layout, self.settings).start()
        self.reader = WeightReader(self.join("rollout", 1, {}), self.layout, self.settings)
        at_end(self.close)

    def join(self, role, index, info):
        return MemoryFleet.join_network(self.network, role, index, info, self.settings)

    def server(self, index, segment):
        return WeightServer(self.join("relay", index, {"segment": segment.path}), segment, self.settings).start()

    def step(self, version):
        self.model(torch.randn(16, 256)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publisher.publish(version, dict(self.model.named_parameters()))
        with waiting("the relays", f"version {version}", 60) as wait:
            wait.until(lambda: all(server.newest == version for server in self.servers))
            wait.until(lambda: self.reader.newest() == version)
        into = np.zeros(self.layout.num_bytes, np.uint8)
        receipt = self.reader.pull(into, 60)
        full = np.zeros(self.layout.num_bytes, np.uint8)
        self.layout.write(dict(self.model.named_parameters()), full)
        assert receipt.version == version
        assert np.array_equal(into, full)

    def close(self):
        for thing in (self.reader, self.publisher, *self.servers, *self.segments):
            thing.close()


def test_deltas_of_a_real_run_are_small_and_lossless_down_the_chain():
    run = Trained(delta=True)
    run.step(1)
    sent = [run.layout.num_bytes] * len(run.servers)
    for version in range(2, 51):
        run.step(version)
        deltas = [server.version_store.differences.get(version) for server in run.servers]
        sent = [
            total + (run.layout.num_bytes if d is None else d[1].nbytes) for total, d in zip(sent, deltas, strict=True)
        ]
    assert all(server.version_store.differences.get(50) is not None for server in run.servers)
    assert max(sent) <= 0.25 * 50 * run.layout.num_bytes


def test_a_relay_without_the_base_is_sent_everything():
    run = Trained(delta=True)
    run.step(1)
    run.step(2)
    late = Segment.create_anonymous()
    at_end(late.close)
    server = run.server(2, late)
    at_end(server.close)
    with waiting("the late relay", "version 2", 60) as wait:
        wait.until(lambda: server.newest == 2)
    assert server.version_store.differences.get(2) is None
    run.step(3)
    with waiting("the late relay", "version 3", 60) as wait:
        wait.until(lambda: server.newest == 3)
    assert server.version_store.differences.get(3) is not None


class Sharded:
    """Two actor ranks that publish the rows of one matrix and of a vector, as parts, to two relays in a chain."""

    def __init__(self):
        self.settings = CommSettings(link="tcp", heartbeat_s=0.02, delta=True)
        self.network = MemoryNetwork()
        self.tensors = {"w": torch.randn(9, 7000), "b": torch.randn(5)}
        self.layout = Layout.of(self.tensors, "bfloat16", 2, {"w": TensorSplit(1)})
        self.segments = [Segment.create_anonymous() for _ in range(2)]
        fleets = [self.join("relay", i, {"segment": s.path}) for i, s in enumerate(self.segments)]
        self.servers = [WeightServer(f, s, self.settings).start() for f, s in zip(fleets, self.segments, strict=True)]
        self.publishers = [
            WeightPublisher(self.join("actor", rank, {}), self.layout, self.settings, self.part(rank)).start()
            for rank in range(2)
        ]
        at_end(self.close)

    def join(self, role, index, info):
        return MemoryFleet.join_network(self.network, role, index, info, self.settings)

    def rows(self, name, rank):
        half = len(self.tensors[name]) // 2
        return (0, half) if rank == 0 else (half, len(self.tensors[name]))

    def part(self, rank):
        owned = {name: self.rows(name, rank) for name in self.tensors}
        runs = [
            ShardRun(entry, low - owned[entry.name][0], high - owned[entry.name][0], start, end)
            for entry in self.layout.entries
            for low, high, start, end in entry.runs(*owned[entry.name])
        ]
        return WeightShard(self.layout, rank, 2, tuple(runs))

    def publish(self, version):
        for rank, publisher in enumerate(self.publishers):
            shards = {name: tensor[slice(*self.rows(name, rank))] for name, tensor in self.tensors.items()}
            publisher.publish(version, shards)
        with waiting("the relays", f"version {version}", 60) as wait:
            wait.until(lambda: all(server.newest == version for server in self.servers))
        full = np.zeros(self.layout.num_bytes, np.uint8)
        self.layout.write(self.tensors, full)
        for server in self.servers:
            held = server.version_store.slots.newest_stored()
            assert held is not None and np.array_equal(server.version_store.slots.segment.slot(held.slot), full)

    def close(self):
        for thing in (*self.publishers, *self.servers, *self.segments):
            thing.close()


def test_deltas_of_several_ranks_become_one_down_the_chain():
    run = Sharded()
    run.publish(1)
    for version in (2, 3):
        run.tensors["w"][:, ::50] += 1
        run.tensors["w"][0, 5] = version
        run.publish(version)
        for server in run.servers:
            delta = server.version_store.differences.get(version)
            assert delta is not None and delta[0].base == version - 1
            assert delta[1].nbytes < 0.1 * run.layout.num_bytes
    run.tensors["w"][:4] += 1  # one rank's rows change everywhere: it sends them whole, and so do the relays
    run.publish(4)
    assert all(server.version_store.differences.get(4) is None for server in run.servers)
