"""The version store of one relay: one version arrives, complete ones stay readable, digests decide."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.in_memory import MemoryLink

from headrace.comm.errors import LinkBroken
from headrace.comm.links.frames import send_data, send_frame
from headrace.comm.messages.weights import Offer
from headrace.comm.shared_memory import Lock, Segment
from headrace.relay.weights.byte_ranges import GRID_BYTES, ByteRanges, digest, digest_of_ranges, ranges_of
from headrace.relay.weights.layout import Layout, WeightShard
from headrace.relay.weights.publisher import PublishedVersions
from headrace.relay.weights.slots import VersionSlots
from headrace.relay.weights.transfer import VersionReceiver, send_version
from headrace.relay.weights.version_store import VersionStore, watermark

NUM_BYTES = 4096
TENSORS = {"w": torch.ones(3 * GRID_BYTES // 4)}


def content(version):
    return np.random.default_rng(version).integers(0, 256, NUM_BYTES, dtype=np.uint8)


class StoreUnderLoad(RuleBasedStateMachine):
    """Upstreams that start, break off, send wrong bytes and overtake each other, and readers at any moment in between.

    A reader always sees whole and right bytes, versions never run backwards, and two complete ones stay readable while a
    third arrives.
    """

    def __init__(self):
        super().__init__()
        self.segment = Segment.create_anonymous()
        self.version_store = VersionStore(self.segment)
        self.reader = VersionSlots(Segment.open(self.segment.path))
        self.version, self.seen, self.num_complete, self.senders = 0, -1, 0, {}

    @rule(upstream=st.sampled_from("ab"), is_new=st.booleans())
    def offer(self, upstream, is_new):
        self.version += is_new
        opened = self.version_store.begin_receive(Offer(self.version, NUM_BYTES, 5), upstream)
        if opened is not None:
            self.senders[upstream] = [*opened, self.version]

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), share=st.floats(0, 1))
    def send(self, data, share):
        incoming, at, version = self.senders[upstream := data.draw(st.sampled_from(sorted(self.senders)))]
        end = at + int(share * (NUM_BYTES - at))
        if not incoming.is_from(0, upstream) or not incoming.is_arriving:
            self.end(upstream)
            return
        incoming.buffer[at:end] = content(version)[at:end]
        assert self.version_store.advance(incoming, 0, upstream, end)
        self.senders[upstream][1] = end

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), is_wrong=st.booleans())
    def finish(self, data, is_wrong):
        incoming, at, version = self.senders[upstream := data.draw(st.sampled_from(sorted(self.senders)))]
        if not incoming.is_from(0, upstream) or not incoming.is_arriving:
            self.end(upstream)
            return
        incoming.buffer[at:] = content(version)[at:]
        self.version_store.advance(incoming, 0, upstream, NUM_BYTES)
        is_right = self.version_store.finish(incoming, 0, digest(content(version + is_wrong)))
        assert is_right is not is_wrong
        self.num_complete += is_right
        self.end(upstream)

    @precondition(lambda self: self.senders)
    @rule(data=st.data())
    def abandon(self, data):
        upstream = data.draw(st.sampled_from(sorted(self.senders)))
        self.version_store.abandon(self.senders[upstream][0], 0, upstream)
        self.end(upstream)

    def end(self, upstream):
        del self.senders[upstream]

    @invariant()
    def every_read_is_whole_and_never_older(self):
        newest = self.reader.newest()
        if newest is None:
            return
        held, into = self.reader.read_with(np.copy)
        assert held.version == newest >= self.seen
        assert np.array_equal(into, content(held.version))
        self.seen = newest

    @invariant()
    def two_versions_stay_readable(self):
        assert len(self.reader.complete_versions()) >= min(2, self.num_complete)

    def teardown(self):
        self.senders.clear()
        self.version_store.close()
        self.reader.segment.close()
        self.segment.close()


TestStoreUnderLoad = StoreUnderLoad.TestCase
TestStoreUnderLoad.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def version_store():
    segment = Segment.create_anonymous()
    store = VersionStore(segment)
    yield store
    store.close()
    segment.close()


def test_a_version_offered_again_continues_at_its_offset(version_store):
    offer = Offer(1, NUM_BYTES, 5)
    incoming, at = version_store.begin_receive(offer, "relay-0")
    assert at == 0 and version_store.advance(incoming, 0, "relay-0", 1000)
    assert version_store.begin_receive(offer, "relay-1") == (incoming, 1000)
    assert not version_store.advance(incoming, 0, "relay-0", 2000)
    assert version_store.num_resumed == 1


def test_a_newer_version_supersedes_one_that_has_not_arrived_and_an_older_one_is_refused(version_store):
    old, _ = version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a")
    version_store.begin_receive(Offer(2, NUM_BYTES, 5), "b")
    assert old.is_abandoned
    assert version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a") is None
    assert not version_store.advance(old, 0, "a", 10)


def test_a_version_in_parts_is_complete_with_the_last_right_one(version_store):
    bytes_ = content(3)
    halves = [((0, 1000), (2000, 4096)), ((1000, 2000),)]
    for part, spans in enumerate(halves):
        offer = Offer(3, NUM_BYTES, 5, num_parts=2, part=part, spans=spans)
        incoming, _ = version_store.begin_receive(offer, f"actor-{part}")
        for start, end in spans:
            incoming.buffer[start:end] = bytes_[start:end]
        assert version_store.slots.newest() is None
        assert version_store.advance(incoming, part, f"actor-{part}", ranges_of(offer).num_bytes)
        assert not version_store.finish(incoming, part, "0" * 32)
        assert version_store.advance(incoming, part, f"actor-{part}", ranges_of(offer).num_bytes)
        assert version_store.finish(incoming, part, digest_of_ranges(bytes_, spans))
    assert version_store.slots.newest_stored().digest == digest(bytes_)


def test_a_part_that_turns_out_wrong_when_it_is_sent_again_no_longer_counts_as_right(version_store):
    bytes_, halves = content(3), [((0, 1000),), ((1000, NUM_BYTES),)]
    offers = [Offer(3, NUM_BYTES, 5, num_parts=2, part=part, spans=spans) for part, spans in enumerate(halves)]

    def send(part, upstream, digest_):
        incoming, _ = version_store.begin_receive(offers[part], upstream)
        for start, end in halves[part]:
            incoming.buffer[start:end] = bytes_[start:end]
        assert version_store.advance(incoming, part, upstream, ranges_of(offers[part]).num_bytes)
        return version_store.finish(incoming, part, digest_)

    right = [digest_of_ranges(bytes_, spans) for spans in halves]
    assert send(0, "a", right[0])
    assert not send(0, "b", "0" * 32)
    assert send(1, "a", right[1])
    assert version_store.slots.newest() is None
    assert send(0, "a", right[0])
    assert version_store.slots.newest_stored().digest == digest(bytes_)


def test_a_store_that_is_closed_completes_no_version(version_store):
    incoming, _ = version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a")
    incoming.buffer[:] = content(1)
    assert version_store.advance(incoming, 0, "a", NUM_BYTES)
    version_store.close()
    assert not version_store.advance(incoming, 0, "a", NUM_BYTES)
    assert not version_store.finish(incoming, 0, digest(content(1)))
    assert version_store.slots.newest() is None


def put(store, version):
    incoming, _ = store.begin_receive(Offer(version, NUM_BYTES, 5), "a")
    incoming.buffer[:] = content(version)
    store.advance(incoming, 0, "a", NUM_BYTES)
    assert store.finish(incoming, 0, digest(content(version)))


@pytest.fixture
def locked_store():
    """A store whose readers lock every slot that may be written; it would wait for them for an hour."""
    segment = Segment.create_anonymous()
    store, reader = VersionStore(segment, reader_lock_s=3600), Segment.open(segment.path)
    for version in (1, 2, 3):
        put(store, version)
    slots = [held.slot for held in store.slots.complete_versions() if held.version < 3]
    assert all(reader.try_lock(slot, Lock.SHARED) for slot in slots)
    yield store, reader, slots
    store.close()
    reader.close()
    segment.close()


def test_a_version_that_waits_for_readers_holds_up_nothing_else(locked_store):
    store, reader, slots = locked_store
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(store.begin_receive, Offer(4, NUM_BYTES, 5), "a")
        for _ in range(100):  # some of these calls run while it waits
            assert store.next_source(3, 0.002) is None
            with closing(store.next_source(2, 0.0)) as source:
                assert source.offer.version == 3
        assert not beginning.done()
        reader.unlock(slots[1], Lock.SHARED)
        assert beginning.result(10)[0].slot.slot == slots[1]


def test_a_store_that_closes_does_not_wait_for_readers(locked_store):
    store, _, _ = locked_store
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(store.begin_receive, Offer(4, NUM_BYTES, 5), "a")
        store.close()
        with pytest.raises(LinkBroken):
            beginning.result(10)


def test_a_version_that_waited_for_readers_is_refused_once_a_newer_one_arrives(locked_store):
    store, reader, slots = locked_store
    with ThreadPoolExecutor(2) as pool:
        newer = pool.submit(store.begin_receive, Offer(5, NUM_BYTES, 5), "b")
        older = pool.submit(store.begin_receive, Offer(4, NUM_BYTES, 5), "a")
        reader.unlock(slots[0], Lock.SHARED)
        incoming, _ = newer.result(10)
        assert incoming.is_arriving and incoming.offer.version == 5
        assert older.result(10) is None or older.result()[0].is_abandoned


def test_a_version_can_leave_before_it_has_arrived_whole(version_store):
    incoming, _ = version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a")
    source = version_store.next_source(above=0, timeout_s=1)
    assert source.bytes_ready(0, 0.01) == 0
    threading.Timer(0.02, version_store.advance, (incoming, 0, "a", 100)).start()
    assert source.bytes_ready(0, 5) == 100
    assert source.digest(0.01) is None and source.is_valid()
    version_store.abandon(incoming, 0, "a")
    assert not source.is_valid()
    source.close()


def test_the_watermark_is_the_first_byte_that_any_part_lacks():
    ranges = {0: ByteRanges(((0, 100), (200, 300))), 1: ByteRanges(((100, 200), (300, 400)))}
    assert watermark(400, 2, {0: ranges[0]}, {0: 200}) == 0
    assert watermark(400, 2, ranges, {0: 200, 1: 0}) == 100
    assert watermark(400, 2, ranges, {0: 150, 1: 150}) == 250
    assert watermark(400, 2, ranges, {0: 200, 1: 150}) == 350
    assert watermark(400, 2, ranges, {0: 200, 1: 200}) == 400


def test_chunks_are_digested_as_they_arrive():
    segment = Segment.create_anonymous()
    store, num_bytes = VersionStore(segment), 2 * GRID_BYTES + 10
    opened = store.begin_receive(Offer(1, num_bytes, 5), "a")
    assert opened is not None
    incoming, _ = opened
    for done in (GRID_BYTES - 1, GRID_BYTES, num_bytes):
        store.advance(incoming, 0, "a", done)
    assert store.finish(incoming, 0, digest(np.zeros(num_bytes, np.uint8)))
    del incoming, opened
    store.close()
    segment.close()


def test_a_version_that_is_copied_gives_way_to_a_newer_one(version_store, monkeypatch):
    """The receiver tells the sender to offer again, and then that it does not want it: the link stays."""
    versions = PublishedVersions(WeightShard.whole(Layout.of(TENSORS, "float32")), 1)
    versions.write(1, TENSORS)
    sender, receiver = MemoryLink.pair()
    copied = []

    def fill(incoming, part, upstream, done, write):
        copied.append(done)
        if len(copied) == 2:
            newer, _ = version_store.begin_receive(msgspec.structs.replace(incoming.offer, version=2), "a")
            newer.buffer[:] = 2
            version_store.advance(newer, 0, "a", newer.buffer.nbytes)
            assert version_store.finish(newer, 0, newer.whole_digest())
        return VersionStore.fill(version_store, incoming, part, upstream, done, write)

    monkeypatch.setattr(version_store, "fill", fill)
    receiving = VersionReceiver(receiver, version_store, "actor-0/chain", versions.segment)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(receiving.run, lambda: False, lambda incoming: None)
        assert send_version(sender, versions.next_source(-1, 1))
        sender.close()
        with pytest.raises(LinkBroken, match="the link is closed"):
            running.result(10)
    assert version_store.slots.newest() == 2 and copied == [GRID_BYTES, 2 * GRID_BYTES]
    _, held = version_store.slots.read_with(np.copy)
    assert (held == 2).all()
    versions.close()


class LateLink(MemoryLink):
    """A link on which a piece of a version is so late that a newer version comes by another way before its bytes."""

    def __init__(self, link: MemoryLink, store: VersionStore) -> None:
        super().__init__(link._out, link._into)
        self.store = store

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        if buffer.nbytes == NUM_BYTES:
            put(self.store, 2)
        super().receive(buffer, deadline_s)


def test_a_late_piece_of_an_older_version_leaves_the_newer_one_as_it_is(version_store):
    sender, receiver = MemoryLink.pair()
    send_frame(sender, Offer(1, NUM_BYTES, 5), 1.0)
    send_data(sender, content(1), 1.0)
    with pytest.raises(LinkBroken, match="version 1 is no longer received"):
        receiving = VersionReceiver(LateLink(receiver, version_store), version_store, "relay-0")
        receiving.run(lambda: False, lambda _: None)
    assert version_store.slots.newest() == 2
    _, held = version_store.slots.read_with(np.copy)
    np.testing.assert_array_equal(held, content(2))
    assert version_store.begin_receive(Offer(3, NUM_BYTES, 5), "a")[0].slot.slot == 0, "its slot is free again"
