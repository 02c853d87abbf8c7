"""Publisher, relays and readers together in one process, through shared memory and over links."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.errors import SettingError, WaitTimeout, WrongDigest
from headrace.comm.messages.weights import VersionReady
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.waits import waiting
from headrace.relay.weights import chain
from headrace.relay.weights.layout import Layout, ShardRun, WeightShard
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.slots import VersionNotAvailable

PATIENCE_S = 60.0
SHAPES = {"embed": (1000, 64), "norm": (64,), "head": (1000, 64)}


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class WeightsScene:
    """Relays, an actor and readers of one test, in one process; everything is closed at its end."""

    def __init__(self, link="auto", num_relays=1, dtype="float32", **settings):
        self.settings = CommSettings(link=link, deadline_s=PATIENCE_S, **settings)  # pyright: ignore[reportArgumentType]
        self.network = MemoryNetwork()
        self.layout = Layout.of(weights(0), dtype)
        self.closing = []
        at_end(self.close)
        self.fleets = []
        self.hub = self.join("hub").open_mailbox("hub")
        self.relays = [self.relay(index) for index in range(num_relays)]

    def join(self, role, index=0, info=None, host="here"):
        return MemoryFleet.join_network(self.network, role, index, info, self.settings, host)

    def relay(self, index, host="here"):
        segment = Segment.create_anonymous()
        fleet = self.join("relay", index, {"segment": segment.path}, host)
        server = WeightServer(fleet, segment, self.settings).start()
        self.closing += [segment, server]
        self.fleets.append(fleet)
        return server

    def publisher(self, index=0, part=None):
        publisher = WeightPublisher(self.join("actor", index), self.layout, self.settings, part)
        self.closing.append(publisher.start())
        return self.closing[-1]

    def reader(self, index=0, layout=None):
        self.closing.append(WeightReader(self.join("rollout", index), layout or self.layout, self.settings))
        return self.closing[-1]

    def close(self):
        while self.closing:
            self.closing.pop().close()


@pytest.fixture(params=["auto", "tcp"])
def scene(request):
    return WeightsScene(request.param)


def until(ready):
    with waiting("the relays", "a change", deadline_s=PATIENCE_S) as wait:
        return wait.until(ready)


def pulled(reader):
    into = np.zeros(reader.layout.num_bytes, np.uint8)
    receipt = reader.pull(into, deadline_s=PATIENCE_S)
    return receipt, reader.layout.views(into)


def assert_is(views, version, dtype=torch.float32):
    assert all(torch.equal(views[name], tensor.to(dtype)) for name, tensor in weights(version).items())


def test_a_reader_gets_what_was_published(scene):
    publisher, reader = scene.publisher(), scene.reader()
    assert reader.newest() is None
    publisher.publish(0, weights(0))
    receipt, views = pulled(reader)
    assert receipt.version == 0
    assert len(receipt.digest) == 32
    assert_is(views, 0)


def test_the_newest_version_follows_each_publish(scene):
    publisher, reader = scene.publisher(), scene.reader()
    for version in range(1, 6):
        publisher.publish(version, weights(version))
        until(lambda version=version: reader.newest() == version)
        receipt, views = pulled(reader)
        assert receipt.version == version
        assert_is(views, version)


def test_the_hub_learns_of_each_complete_version_and_its_digest(scene):
    publisher, reader = scene.publisher(), scene.reader()
    publisher.publish(3, weights(3))
    receipt, _ = pulled(reader)
    assert scene.hub.receive(PATIENCE_S).message == VersionReady(3, receipt.digest)
    assert scene.hub.receive(0.05) is None


def test_the_next_process_of_a_relay_tells_the_hub_of_the_version_that_it_finds(scene):
    scene.publisher().publish(3, weights(3))
    told = scene.hub.receive(PATIENCE_S).message
    (server,) = scene.relays
    server.close()
    segment = Segment.open(server.version_store.slots.segment.path)
    scene.closing += [
        segment,
        WeightServer(scene.join("relay", 0, {"segment": segment.path}), segment, scene.settings).start(),
    ]
    assert scene.hub.receive(PATIENCE_S).message == told, "the one before may have died before it did"


def test_tensors_may_change_once_publish_has_returned(scene):
    publisher, reader = scene.publisher(), scene.reader()
    tensors = weights(1)
    publisher.publish(1, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert_is(pulled(reader)[1], 1)


def test_a_rank_of_the_actor_without_rows_of_its_own_does_not_hold_a_version_up(scene):
    runs = [ShardRun(e, *run) for e in scene.layout.entries for run in e.runs(0, SHAPES[e.name][0])]
    parts = [WeightShard(scene.layout, rank, 2, tuple(own)) for rank, own in enumerate((runs, []))]
    publishers, reader = [scene.publisher(rank, part) for rank, part in enumerate(parts)], scene.reader()
    for publisher in publishers:
        publisher.publish(1, weights(1))
    until(lambda: reader.newest() == 1)
    assert_is(pulled(reader)[1], 1)


def test_versions_published_in_a_rush_are_never_mixed_and_the_last_arrives(scene):
    publisher, reader = scene.publisher(), scene.reader()
    for version in range(60):
        publisher.publish(version, weights(version))
        if reader.newest() is not None:
            receipt, views = pulled(reader)
            assert_is(views, receipt.version)
    until(lambda: reader.newest() == 59)
    assert_is(pulled(reader)[1], 59)


def test_a_version_published_before_the_close_arrives(scene):
    reader, publisher = scene.reader(), scene.publisher()
    publisher.publish(8, weights(8))
    publisher.close()
    until(lambda: reader.newest() == 8)
    assert_is(pulled(reader)[1], 8)


def test_weights_are_cast_on_the_way():
    scene = WeightsScene(dtype="bfloat16")
    publisher, reader = scene.publisher(), scene.reader()
    publisher.publish(1, weights(1))
    assert_is(pulled(reader)[1], 1, torch.bfloat16)


@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_versions_reach_the_readers_of_every_relay_down_the_chain(link):
    scene = WeightsScene(link, num_relays=3)
    publisher, readers = scene.publisher(), [scene.reader(index) for index in range(3)]
    assert len({reader.relay for reader in readers}) == 3
    for version in (1, 2, 3):
        publisher.publish(version, weights(version))
    for reader in readers:
        until(lambda reader=reader: reader.newest() == 3)
        assert_is(pulled(reader)[1], 3)


def test_a_relay_that_joins_late_catches_up():
    scene = WeightsScene(num_relays=1)
    publisher = scene.publisher()
    publisher.publish(5, weights(5))
    late = scene.relay(1)
    assert until(lambda: late.newest == 5)


def test_a_dead_relay_in_the_middle_is_passed_over():
    scene = WeightsScene(num_relays=3)
    publisher = scene.publisher()
    publisher.publish(1, weights(1))
    assert until(lambda: [relay.newest for relay in scene.relays] == [1, 1, 1])
    scene.fleets[1].crash()
    scene.relays[1].close()
    publisher.publish(2, weights(2))
    assert until(lambda: scene.relays[2].newest == 2)
    assert scene.relays[1].newest == 1


def test_without_its_head_the_chain_begins_at_the_next_relay():
    scene = WeightsScene(num_relays=2)
    publisher = scene.publisher()
    scene.fleets[0].crash()
    scene.relays[0].close()
    publisher.publish(1, weights(1))
    assert until(lambda: scene.relays[1].newest == 1)


def test_another_layout_is_refused_by_name():
    scene = WeightsScene()
    scene.publisher().publish(1, weights(1))
    other = Layout.of({"embed": torch.zeros(1)}, "float32")
    with pytest.raises(WrongDigest, match="relay-0.*model.path"):
        scene.reader(layout=other).pull(np.zeros(64, np.uint8), PATIENCE_S)


def test_waiting_for_a_first_version_names_the_relay():
    scene = WeightsScene()
    with pytest.raises(WaitTimeout, match="relay-0, a first version"):
        scene.reader().pull(np.zeros(scene.layout.num_bytes, np.uint8), 0.05)


def test_pulls_of_many_threads_during_pushes_are_whole():
    scene = WeightsScene()
    publisher = scene.publisher()
    publisher.publish(0, weights(0))
    failures, pulls, stop = [], [], threading.Event()

    def pull(reader):
        while not stop.is_set():
            receipt, views = pulled(reader)
            pulls.append(receipt.version)
            if not torch.equal(views["head"], weights(receipt.version)["head"]):
                failures.append(receipt)

    readers = [scene.reader(index) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        pulling = [pool.submit(pull, reader) for reader in readers]
        try:
            for version in range(1, 40):
                publisher.publish(version, weights(version))
                until(lambda version=version: scene.relays[0].newest == version and version in pulls[-3:])
        finally:
            stop.set()
        for done in pulling:
            done.result()
    assert not failures


def test_a_version_that_only_the_dead_head_had_is_pushed_to_the_next():
    scene = WeightsScene(num_relays=2)
    publisher = scene.publisher()
    scene.relays[0].chain.close()
    publisher.publish(4, weights(4))
    assert until(lambda: scene.relays[0].newest == 4)
    assert scene.relays[1].newest is None
    scene.fleets[0].crash()
    assert until(lambda: scene.relays[1].newest == 4)


def test_relays_that_die_do_not_each_leave_a_version_in_the_trainers_memory():
    scene = WeightsScene()
    publisher = scene.publisher()
    for version in range(8):
        publisher.publish(version, weights(version))
        assert until(lambda version=version: scene.relays[-1].newest == version)
        scene.fleets[-1].crash()
        scene.relays[-1].close()
        scene.relays.append(scene.relay(version + 1))
        assert until(lambda version=version: scene.relays[-1].newest == version)
    assert publisher._versions.segment.num_slots <= 2
    assert until(lambda: Path("/proc/self/maps").read_text().count("weights to publish") <= 6)


def test_an_older_version_comes_from_a_relay_that_still_holds_it(scene):
    publisher, reader = scene.publisher(), scene.reader()
    for version in (1, 2):
        publisher.publish(version, weights(version))
        until(lambda version=version: reader.newest() == version)
    into = np.zeros(scene.layout.num_bytes, np.uint8)
    assert reader.pull_version(1, into).version == 1
    assert_is(scene.layout.views(into), 1)
    late = scene.relay(1)
    until(lambda: late.newest == 2)
    other = next(r for r in (scene.reader(1), scene.reader(2)) if r.relay == "relay-1")
    if scene.settings.link == "auto":
        assert [held.version for held in other.slots.complete_versions()] == [2]
    assert other.pull_version(1, into).version == 1
    assert_is(scene.layout.views(into), 1)
    with pytest.raises(VersionNotAvailable, match="no checkpoints"):
        other.pull_version(0, into)


def test_shared_memory_cannot_be_forced_onto_another_host_from_either_side():
    scene = WeightsScene(link="shm")
    reader, actor = scene.join("rollout", 7, host="elsewhere"), scene.join("actor", 7, host="elsewhere")
    with pytest.raises(SettingError, match="comm.link: shm cannot reach relay-0"):
        WeightReader(reader, scene.layout, scene.settings)
    publisher = WeightPublisher(actor, scene.layout, scene.settings).start()
    scene.closing.append(publisher)
    until(lambda: publisher.failure)
    with pytest.raises(SettingError, match="comm.link: shm cannot reach relay-0"):
        publisher.publish(1, weights(1))


def test_a_reader_on_a_host_without_a_relay_receives_versions_over_a_link():
    scene = WeightsScene()
    publisher = scene.publisher()
    reader = WeightReader(scene.join("rollout", 7, host="elsewhere"), scene.layout, scene.settings)
    scene.closing.append(reader)
    publisher.publish(1, weights(1))
    until(lambda: reader.newest() == 1)
    assert_is(pulled(reader)[1], 1)


@pytest.mark.parametrize("is_polled", [False, True])
def test_a_pull_refuses_bytes_that_do_not_match_their_digest(is_polled):
    scene = WeightsScene()
    publisher, reader = scene.publisher(), scene.reader()
    publisher.publish(1, weights(1))
    until(lambda: scene.relays[0].newest == 1)
    held = scene.relays[0].version_store.slots.newest_stored()
    assert held is not None
    scene.relays[0].version_store.slots.segment.slot(held.slot)[5] ^= 1
    if is_polled:
        assert reader.newest() == 1
    with pytest.raises(WrongDigest, match="relay-0"):
        reader.pull(np.zeros(scene.layout.num_bytes, np.uint8), PATIENCE_S)
    publisher.publish(2, weights(2))
    until(lambda: reader.newest() == 2)
    assert_is(pulled(reader)[1], 2)


def test_a_version_that_was_checked_ahead_is_only_copied():
    scene = WeightsScene()
    publisher, reader = scene.publisher(), scene.reader()
    for version in (1, 2):
        publisher.publish(version, weights(version))
        until(lambda version=version: reader.newest() == version and reader.checked is not None)
        assert_is(pulled(reader)[1], version)
        assert pulled(reader)[0].version == version


def test_a_head_that_does_not_answer_is_passed_over_long_before_it_counts_as_dead(monkeypatch):
    monkeypatch.setattr(chain, "SILENCE_S", 1.0)
    scene = WeightsScene(num_relays=0, expiry_s=10 * PATIENCE_S)
    frozen = Segment.create_anonymous()
    scene.closing.append(frozen)
    mailbox = scene.join("relay", 0, {"segment": frozen.path}).open_mailbox("relay-0/weights")
    scene.relays = [scene.relay(1)]
    publisher = scene.publisher()
    for version in (1, 2, 3):
        publisher.publish(version, weights(version))
        assert until(lambda version=version: scene.relays[0].newest == version)
    assert [relay.name for relay in scene.fleets[-1].alive_members("relay")] == ["relay-0", "relay-1"]
    asked = 0
    while mailbox.receive(0) is not None:
        asked += 1
    assert 1 <= asked <= 3  # a suspected relay is not asked again for every version
