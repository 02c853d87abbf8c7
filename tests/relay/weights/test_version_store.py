import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.comm.errors import LinkBroken
from headrace.comm.messages.offer import Offer
from headrace.comm.shared_memory import Hold, Segment
from headrace.relay.weights.digests import GRID_BYTES, digest, digest_of_ranges
from headrace.relay.weights.frames import ranges_of
from headrace.relay.weights.incoming import State, watermark
from headrace.relay.weights.shards import Ranges
from headrace.relay.weights.slots import Shelf
from headrace.relay.weights.version_store import Desk

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
        self.desk = Desk(self.segment)
        self.reader = Shelf(Segment.open(self.segment.path))
        self.version, self.seen, self.num_complete, self.bringing = 0, -1, 0, {}

    @rule(upstream=st.sampled_from("ab"), is_new=st.booleans())
    def offer(self, upstream, is_new):
        self.version += is_new
        opened = self.desk.open(Offer(self.version, NUM_BYTES, 5), upstream)
        if opened is not None:
            self.bringing[upstream] = [*opened, self.version]

    @precondition(lambda self: self.bringing)
    @rule(data=st.data(), share=st.floats(0, 1))
    def bring(self, data, share):
        arrival, at, version = self.bringing[upstream := data.draw(st.sampled_from(sorted(self.bringing)))]
        end = at + int(share * (NUM_BYTES - at))
        if not arrival.is_brought_by(0, upstream) or arrival.state is not State.ARRIVING:
            self.leave(upstream)
            return
        arrival.buffer[at:end] = content(version)[at:end]
        assert self.desk.advance(arrival, 0, upstream, end)
        self.bringing[upstream][1] = end

    @precondition(lambda self: self.bringing)
    @rule(data=st.data(), is_liar=st.booleans())
    def finish(self, data, is_liar):
        arrival, at, version = self.bringing[upstream := data.draw(st.sampled_from(sorted(self.bringing)))]
        if not arrival.is_brought_by(0, upstream) or arrival.state is not State.ARRIVING:
            self.leave(upstream)
            return
        arrival.buffer[at:] = content(version)[at:]
        self.desk.advance(arrival, 0, upstream, NUM_BYTES)
        is_right = self.desk.finish(arrival, 0, digest(content(version + is_liar)))
        assert is_right is not is_liar
        self.num_complete += is_right
        self.leave(upstream)

    @precondition(lambda self: self.bringing)
    @rule(data=st.data())
    def give_up(self, data):
        upstream = data.draw(st.sampled_from(sorted(self.bringing)))
        self.desk.abandon(self.bringing[upstream][0], 0, upstream)
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
        assert len(self.reader.held()) >= min(2, self.num_complete)

    def teardown(self):
        self.bringing.clear()
        self.desk.close()
        self.reader.segment.close()
        self.segment.close()


TestARelayUnderFire = ARelayUnderFire.TestCase
TestARelayUnderFire.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def desk():
    segment = Segment.create_anonymous()
    desk = Desk(segment)
    yield desk
    desk.close()
    segment.close()


def test_a_version_offered_again_goes_on_where_it_was(desk):
    offer = Offer(1, NUM_BYTES, 5)
    arrival, at = desk.open(offer, "relay-0")
    assert at == 0 and desk.advance(arrival, 0, "relay-0", 1000)
    assert desk.open(offer, "relay-1") == (arrival, 1000)
    assert not desk.advance(arrival, 0, "relay-0", 2000)
    assert desk.num_resumed == 1


def test_a_newer_version_supersedes_one_that_has_not_arrived_and_an_older_is_not_wanted(desk):
    old, _ = desk.open(Offer(1, NUM_BYTES, 5), "a")
    desk.open(Offer(2, NUM_BYTES, 5), "b")
    assert old.state is State.ABANDONED
    assert desk.open(Offer(1, NUM_BYTES, 5), "a") is None
    assert not desk.advance(old, 0, "a", 10)


def test_a_version_in_parts_is_complete_with_the_last_right_one(desk):
    bytes_ = content(3)
    halves = [((0, 1000), (2000, 4096)), ((1000, 2000),)]
    for part, spans in enumerate(halves):
        offer = Offer(3, NUM_BYTES, 5, num_parts=2, part=part, spans=spans)
        arrival, _ = desk.open(offer, f"actor-{part}")
        for start, end in spans:
            arrival.buffer[start:end] = bytes_[start:end]
        assert desk.shelf.newest() is None
        assert desk.advance(arrival, part, f"actor-{part}", ranges_of(offer).num_bytes)
        assert not desk.finish(arrival, part, "0" * 32)
        assert desk.advance(arrival, part, f"actor-{part}", ranges_of(offer).num_bytes)
        assert desk.finish(arrival, part, digest_of_ranges(bytes_, spans))
    assert desk.shelf.newest_held().digest == digest(bytes_)


def test_a_slot_reserved_ahead_is_bound_to_its_version_when_it_is_filled(desk):
    reserved = desk.reserve(Offer(-1, NUM_BYTES, 5))
    assert desk.reserve(Offer(-1, NUM_BYTES, 5)) is reserved
    reserved.buffer[:] = content(7)
    offer = Offer(7, NUM_BYTES, 5)
    assert desk.bind(offer, "actor", reserved.slot.generation + 2) is None
    arrival = desk.bind(offer, "actor", reserved.slot.generation)
    assert desk.advance(arrival, 0, "actor", NUM_BYTES)
    assert desk.finish(arrival, 0, digest(content(7)))
    assert desk.shelf.newest() == 7


def brought(desk, version):
    arrival, _ = desk.open(Offer(version, NUM_BYTES, 5), "a")
    arrival.buffer[:] = content(version)
    desk.advance(arrival, 0, "a", NUM_BYTES)
    assert desk.finish(arrival, 0, digest(content(version)))


@pytest.fixture
def patient():
    """A desk whose readers hold every slot that may be written; it would wait for them for an hour."""
    segment = Segment.create_anonymous()
    desk, reader = Desk(segment, lease_s=3600), Segment.open(segment.path)
    for version in (1, 2, 3):
        brought(desk, version)
    slots = [held.slot for held in desk.shelf.held() if held.version < 3]
    assert all(reader.take(slot, Hold.LEASE) for slot in slots)
    yield desk, reader, slots
    desk.close()
    reader.close()
    segment.close()


@pytest.mark.parametrize("begin", [lambda d, o: d.open(o, "a")[0], lambda d, o: d.reserve(o)], ids=["open", "reserve"])
def test_a_version_that_waits_for_readers_holds_up_nothing_else(patient, begin):
    desk, reader, slots = patient
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(begin, desk, Offer(4, NUM_BYTES, 5))
        for _ in range(100):  # some of these come while it waits
            assert desk.wait_newer(3, 0.002) is None
            assert desk.wait_newer(2, 0.0) == 3
            assert desk.delta_of(3) is None
        assert not beginning.done()
        reader.give_back(slots[1], Hold.LEASE)
        assert beginning.result(10).slot.slot == slots[1]


def test_a_desk_that_closes_does_not_wait_for_readers(patient):
    desk, _, _ = patient
    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(desk.open, Offer(4, NUM_BYTES, 5), "a")
        desk.close()
        with pytest.raises(LinkBroken):
            beginning.result(10)


def test_a_version_that_waited_for_readers_is_not_wanted_once_a_newer_one_arrives(patient):
    desk, reader, slots = patient
    with ThreadPoolExecutor(2) as pool:
        newer = pool.submit(desk.open, Offer(5, NUM_BYTES, 5), "b")
        older = pool.submit(desk.open, Offer(4, NUM_BYTES, 5), "a")
        reader.give_back(slots[0], Hold.LEASE)
        arrival, _ = newer.result(10)
        assert arrival.state is State.ARRIVING and arrival.offer.version == 5
        assert older.result(10) is None or older.result()[0].state is State.ABANDONED


def test_what_arrives_can_leave_before_it_is_whole(desk):
    segment = Segment.open(desk.shelf.segment.path)
    arrival, _ = desk.open(Offer(1, NUM_BYTES, 5), "a")
    cargo = desk.cargo(segment, above=0, timeout_s=1)
    assert cargo.arrived(0, 0.01) == 0
    threading.Timer(0.02, desk.advance, (arrival, 0, "a", 100)).start()
    assert cargo.arrived(0, 5) == 100
    assert cargo.digest(0.01) is None and cargo.is_still()
    desk.abandon(arrival, 0, "a")
    assert not cargo.is_still()
    cargo.close()
    segment.close()


def test_the_watermark_is_the_first_byte_that_any_part_lacks():
    ranges = {0: Ranges(((0, 100), (200, 300))), 1: Ranges(((100, 200), (300, 400)))}
    assert watermark(400, 2, {0: ranges[0]}, {0: 200}) == 0
    assert watermark(400, 2, ranges, {0: 200, 1: 0}) == 100
    assert watermark(400, 2, ranges, {0: 150, 1: 150}) == 250
    assert watermark(400, 2, ranges, {0: 200, 1: 150}) == 350
    assert watermark(400, 2, ranges, {0: 200, 1: 200}) == 400


def test_chunks_are_digested_as_they_arrive():
    segment = Segment.create_anonymous()
    desk, num_bytes = Desk(segment), 2 * GRID_BYTES + 10
    opened = desk.open(Offer(1, num_bytes, 5), "a")
    assert opened is not None
    arrival, _ = opened
    for done in (GRID_BYTES - 1, GRID_BYTES, num_bytes):
        desk.advance(arrival, 0, "a", done)
    assert desk.finish(arrival, 0, digest(np.zeros(num_bytes, np.uint8)))
    del arrival, opened
    desk.close()
    segment.close()
