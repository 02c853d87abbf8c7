import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.comm.errors import LinkBroken
from headrace.comm.messages.weights import Offer
from headrace.comm.shared_memory import Lock, Segment
from headrace.relay.weights.byte_ranges import GRID_BYTES, ByteRanges, digest, digest_of_ranges, ranges_of
from headrace.relay.weights.incoming import IncomingState, watermark
from headrace.relay.weights.slots import VersionSlots
from headrace.relay.weights.version_store import VersionStore

NUM_BYTES = 4096


def content(version):
    return np.random.default_rng(version).integers(0, 256, NUM_BYTES, dtype=np.uint8)


class ARelayUnderFire(RuleBasedStateMachine):
    """Upstreams that come, break off, lie and overtake each other, and readers at any moment in between.

    Whatever happens: what a reader sees is whole and right, versions never run backwards, and two complete ones stay
    readable while a third arrives.
    """

    def __init__(self):
        super().__init__()
        self.segment = Segment.create_anonymous()
        self.version_store = VersionStore(self.segment)
        self.reader = VersionSlots(Segment.open(self.segment.path))
        self.version, self.seen, self.num_complete, self.bringing = 0, -1, 0, {}

    @rule(upstream=st.sampled_from("ab"), is_new=st.booleans())
    def offer(self, upstream, is_new):
        self.version += is_new
        opened = self.version_store.begin_receive(Offer(self.version, NUM_BYTES, 5), upstream)
        if opened is not None:
            self.bringing[upstream] = [*opened, self.version]

    @precondition(lambda self: self.bringing)
    @rule(data=st.data(), share=st.floats(0, 1))
    def bring(self, data, share):
        arrival, at, version = self.bringing[upstream := data.draw(st.sampled_from(sorted(self.bringing)))]
        end = at + int(share * (NUM_BYTES - at))
        if not arrival.is_from(0, upstream) or arrival.state is not IncomingState.ARRIVING:
            self.leave(upstream)
            return
        arrival.buffer[at:end] = content(version)[at:end]
        assert self.version_store.advance(arrival, 0, upstream, end)
        self.bringing[upstream][1] = end

    @precondition(lambda self: self.bringing)
    @rule(data=st.data(), is_liar=st.booleans())
    def finish(self, data, is_liar):
        arrival, at, version = self.bringing[upstream := data.draw(st.sampled_from(sorted(self.bringing)))]
        if not arrival.is_from(0, upstream) or arrival.state is not IncomingState.ARRIVING:
            self.leave(upstream)
            return
        arrival.buffer[at:] = content(version)[at:]
        self.version_store.advance(arrival, 0, upstream, NUM_BYTES)
        is_right = self.version_store.finish(arrival, 0, digest(content(version + is_liar)))
        assert is_right is not is_liar
        self.num_complete += is_right
        self.leave(upstream)

    @precondition(lambda self: self.bringing)
    @rule(data=st.data())
    def give_up(self, data):
        upstream = data.draw(st.sampled_from(sorted(self.bringing)))
        self.version_store.abandon(self.bringing[upstream][0], 0, upstream)
        self.leave(upstream)

    def leave(self, upstream):
        del self.bringing[upstream]

    @invariant()
    def what_is_read_is_whole_and_never_older(self):
        newest = self.reader.newest()
        if newest is None:
            return
        into = np.zeros(NUM_BYTES, np.uint8)
        held = self.reader.read(into)
        assert held.version == newest >= self.seen
        assert np.array_equal(into, content(held.version))
        self.seen = newest

    @invariant()
    def two_versions_stay_readable(self):
        assert len(self.reader.complete_versions()) >= min(2, self.num_complete)

    def teardown(self):
        self.bringing.clear()
        self.version_store.close()
        self.reader.segment.close()
        self.segment.close()


TestARelayUnderFire = ARelayUnderFire.TestCase
TestARelayUnderFire.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def version_store():
    segment = Segment.create_anonymous()
    desk = VersionStore(segment)
    yield desk
    desk.close()
    segment.close()


def test_a_version_offered_again_goes_on_where_it_was(version_store):
    offer = Offer(1, NUM_BYTES, 5)
    arrival, at = version_store.begin_receive(offer, "relay-0")
    assert at == 0 and version_store.advance(arrival, 0, "relay-0", 1000)
    assert version_store.begin_receive(offer, "relay-1") == (arrival, 1000)
    assert not version_store.advance(arrival, 0, "relay-0", 2000)
    assert version_store.num_resumed == 1


def test_a_newer_version_supersedes_one_that_has_not_arrived_and_an_older_is_not_wanted(version_store):
    old, _ = version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a")
    version_store.begin_receive(Offer(2, NUM_BYTES, 5), "b")
    assert old.state is IncomingState.ABANDONED
    assert version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a") is None
    assert not version_store.advance(old, 0, "a", 10)


def test_a_version_in_parts_is_complete_with_the_last_right_one(version_store):
    bytes_ = content(3)
    halves = [((0, 1000), (2000, 4096)), ((1000, 2000),)]
    for part, spans in enumerate(halves):
        offer = Offer(3, NUM_BYTES, 5, num_parts=2, part=part, spans=spans)
        arrival, _ = version_store.begin_receive(offer, f"actor-{part}")
        for start, end in spans:
            arrival.buffer[start:end] = bytes_[start:end]
        assert version_store.slots.newest() is None
        assert version_store.advance(arrival, part, f"actor-{part}", ranges_of(offer).num_bytes)
        assert not version_store.finish(arrival, part, "0" * 32)
        assert version_store.advance(arrival, part, f"actor-{part}", ranges_of(offer).num_bytes)
        assert version_store.finish(arrival, part, digest_of_ranges(bytes_, spans))
    assert version_store.slots.newest_stored().digest == digest(bytes_)


def test_a_slot_reserved_ahead_is_bound_to_its_version_when_it_is_filled(version_store):
    reserved = version_store.reserve_slot(Offer(-1, NUM_BYTES, 5))
    assert version_store.reserve_slot(Offer(-1, NUM_BYTES, 5)) is reserved
    reserved.buffer[:] = content(7)
    offer = Offer(7, NUM_BYTES, 5)
    assert version_store.bind_reservation(offer, "actor", reserved.slot.generation + 2) is None
    arrival = version_store.bind_reservation(offer, "actor", reserved.slot.generation)
    assert version_store.advance(arrival, 0, "actor", NUM_BYTES)
    assert version_store.finish(arrival, 0, digest(content(7)))
    assert version_store.slots.newest() == 7


def brought(desk, version):
    arrival, _ = desk.begin_receive(Offer(version, NUM_BYTES, 5), "a")
    arrival.buffer[:] = content(version)
    desk.advance(arrival, 0, "a", NUM_BYTES)
    assert desk.finish(arrival, 0, digest(content(version)))


@pytest.fixture
def patient():
    """A desk whose readers hold every slot that may be written; it would wait for them for an hour."""
    segment = Segment.create_anonymous()
    desk, reader = VersionStore(segment, reader_lock_s=3600), Segment.open(segment.path)
    for version in (1, 2, 3):
        brought(desk, version)
    slots = [held.slot for held in desk.slots.complete_versions() if held.version < 3]
    assert all(reader.try_lock(slot, Lock.SHARED) for slot in slots)
    yield desk, reader, slots
    desk.close()
    reader.close()
    segment.close()


@pytest.mark.parametrize(
    "begin", [lambda d, o: d.begin_receive(o, "a")[0], lambda d, o: d.reserve_slot(o)], ids=["open", "reserve"]
)
def test_a_version_that_waits_for_readers_holds_up_nothing_else(patient, begin):
    desk, reader, slots = patient
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(begin, desk, Offer(4, NUM_BYTES, 5))
        for _ in range(100):  # some of these come while it waits
            assert desk.wait_newer(3, 0.002) is None
            assert desk.wait_newer(2, 0.0) == 3
            assert desk.delta_of(3) is None
        assert not beginning.done()
        reader.unlock(slots[1], Lock.SHARED)
        assert beginning.result(10).slot.slot == slots[1]


def test_a_desk_that_closes_does_not_wait_for_readers(patient):
    desk, _, _ = patient
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(desk.begin_receive, Offer(4, NUM_BYTES, 5), "a")
        desk.close()
        with pytest.raises(LinkBroken):
            beginning.result(10)


def test_a_version_that_waited_for_readers_is_not_wanted_once_a_newer_one_arrives(patient):
    desk, reader, slots = patient
    with ThreadPoolExecutor(2) as pool:
        newer = pool.submit(desk.begin_receive, Offer(5, NUM_BYTES, 5), "b")
        older = pool.submit(desk.begin_receive, Offer(4, NUM_BYTES, 5), "a")
        reader.unlock(slots[0], Lock.SHARED)
        arrival, _ = newer.result(10)
        assert arrival.state is IncomingState.ARRIVING and arrival.offer.version == 5
        assert older.result(10) is None or older.result()[0].state is IncomingState.ABANDONED


def test_what_arrives_can_leave_before_it_is_whole(version_store):
    segment = Segment.open(version_store.slots.segment.path)
    arrival, _ = version_store.begin_receive(Offer(1, NUM_BYTES, 5), "a")
    cargo = version_store.next_source(VersionSlots(segment), above=0, timeout_s=1)
    assert cargo.bytes_ready(0, 0.01) == 0
    threading.Timer(0.02, version_store.advance, (arrival, 0, "a", 100)).start()
    assert cargo.bytes_ready(0, 5) == 100
    assert cargo.digest(0.01) is None and cargo.is_valid()
    version_store.abandon(arrival, 0, "a")
    assert not cargo.is_valid()
    cargo.close()
    segment.close()


def test_the_watermark_is_the_first_byte_that_any_part_lacks():
    ranges = {0: ByteRanges(((0, 100), (200, 300))), 1: ByteRanges(((100, 200), (300, 400)))}
    assert watermark(400, 2, {0: ranges[0]}, {0: 200}) == 0
    assert watermark(400, 2, ranges, {0: 200, 1: 0}) == 100
    assert watermark(400, 2, ranges, {0: 150, 1: 150}) == 250
    assert watermark(400, 2, ranges, {0: 200, 1: 150}) == 350
    assert watermark(400, 2, ranges, {0: 200, 1: 200}) == 400


def test_chunks_are_digested_as_they_arrive():
    segment = Segment.create_anonymous()
    desk, num_bytes = VersionStore(segment), 2 * GRID_BYTES + 10
    opened = desk.begin_receive(Offer(1, num_bytes, 5), "a")
    assert opened is not None
    arrival, _ = opened
    for done in (GRID_BYTES - 1, GRID_BYTES, num_bytes):
        desk.advance(arrival, 0, "a", done)
    assert desk.finish(arrival, 0, digest(np.zeros(num_bytes, np.uint8)))
    del arrival, opened
    desk.close()
    segment.close()
