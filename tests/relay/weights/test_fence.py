"""The trainer's ranks start again together: what an earlier incarnation of theirs still sends never reaches a version."""

import logging

import numpy as np
import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.errors import LinkBroken
from headrace.comm.messages.weights import Offer
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.waits import waiting
from headrace.relay.weights.layout import Layout, ShardRun, WeightShard
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.version_store import VersionStore

NUM_BYTES = 4096
ROWS = 8


def until(ready):
    with waiting("the relay", "a change", deadline_s=60) as wait:
        return wait.until(ready)


class TwoRanks:
    """A relay, and ranks of a trainer that own half of the rows of one matrix each."""

    def __init__(self, link):
        self.settings = CommSettings(link=link, deadline_s=60)
        self.network, self.segment = MemoryNetwork(), Segment.create_anonymous()
        self.layout = Layout.of({"w": torch.zeros(ROWS, 100)}, "float32")
        self.relay = self.join("relay", 0, {"segment": self.segment.path})
        self.server = WeightServer(self.relay, self.segment, self.settings).start()
        self.publishers = []
        at_end(self.close)

    def join(self, role, index, info=None):
        return MemoryFleet.join_network(self.network, role, index, info, self.settings)

    def publish(self, rank, incarnation, version):
        """Publish the rows of a rank, which are all equal to the incarnation."""
        (entry,) = self.layout.entries
        low, high = rank * ROWS // 2, (rank + 1) * ROWS // 2
        runs = tuple(ShardRun(entry, a - low, b - low, start, end) for a, b, start, end in entry.runs(low, high))
        shard, fleet = WeightShard(self.layout, rank, 2, runs), self.join("actor", rank)
        publisher = WeightPublisher(fleet, self.layout, self.settings, shard, incarnation).start()
        self.publishers.append(publisher)
        publisher.publish(version, {"w": torch.full((ROWS // 2, 100), float(incarnation))})
        return publisher

    def published(self):
        """The newest version's matrix."""
        _, copy = self.server.version_store.slots.read_with(np.copy)
        return self.layout.views(copy)["w"]

    def close(self):
        self.relay.leave()  # so the publisher of a fenced rank does not wait for it
        for thing in (*self.publishers, self.server, self.segment):
            thing.close()


@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_a_rank_that_was_frozen_while_the_others_started_again_completes_no_version(link, caplog):
    caplog.set_level(logging.INFO)
    ranks = TwoRanks(link)
    ranks.publish(0, 1, version=5).close()
    ranks.join("actor", 0)  # rank 0 died with its part in the relay, and is back
    ranks.publish(1, 1, version=5)
    until(lambda: "incarnation 1 of the trainer is fenced" in caplog.text)
    assert ranks.server.newest is None


@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_a_version_never_has_parts_of_two_incarnations(link):
    ranks = TwoRanks(link)
    ranks.publish(0, 1, version=5).close()
    ranks.publish(1, 2, version=5).close()
    assert ranks.server.newest is None
    ranks.publish(0, 2, version=5)
    until(lambda: ranks.server.newest == 5)
    assert (ranks.published() == 2).all()


@pytest.fixture
def store():
    segment = Segment.create_anonymous()
    store = VersionStore(segment)
    yield store
    store.close()
    segment.close()


def offer(version, incarnation):
    return Offer(version, NUM_BYTES, 5, incarnation=incarnation)


def test_a_link_of_an_earlier_incarnation_breaks_in_the_middle_of_a_version(store):
    incoming, _ = store.begin_receive(offer(7, 1), "actor-0/weights")
    assert store.advance(incoming, 0, "actor-0/weights", 1000)
    assert store.begin_receive(offer(6, 2), "actor-0/weights")[0].offer.version == 6, "what arrives is void"
    assert not store.advance(incoming, 0, "actor-0/weights", 2000)
    with pytest.raises(LinkBroken, match="fenced"):
        store.begin_receive(offer(8, 1), "actor-0/weights")


def test_a_complete_version_is_sent_on_after_its_trainer_has_started_again(store):
    incoming, _ = store.begin_receive(offer(7, 1), "actor-0/weights")
    store.advance(incoming, 0, "actor-0/weights", NUM_BYTES)
    assert store.finish(incoming, 0, incoming.part_digest(0))
    store.fence(2)
    other = Segment.create_anonymous()
    late = VersionStore(other)
    late.fence(2)
    source = store.next_source(above=0, timeout_s=1)
    assert source.offer.identity == offer(7, 1).identity
    assert late.begin_receive(source.offer, "relay-0/chain") is not None
    source.close()
    late.close()
    other.close()
