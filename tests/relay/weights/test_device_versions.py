"""Weights that rollouts copy from the actor's device: on the CPU, a segment stands for the memory of a GPU."""

import subprocess
import sys
import threading
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy

from headrace.comm.fleet import Fleet
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.store import StoreServer
from headrace.comm.tensor_split import TensorSplit
from headrace.comm.waits import waiting
from headrace.relay.weights.device_versions import DeviceVersionReader, DeviceVersions
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.shards import ShardRun, WeightShard
from headrace.relay.weights.slots import VersionSlots
from headrace.rollout.weights import RolloutWeights
from headrace.trainer.policy.model import load_policy

CPU = torch.device("cpu")
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = {"embed": (11, 3), "norm": (7,), "up": (8, 5), "down": (5, 8)}
SPLITS = {"up": TensorSplit(0), "down": TensorSplit(1)}
SETTINGS = CommSettings(heartbeat_s=0.02, deadline_s=60, cuda_ipc=True)


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows_of(name, index, num_parts):
    """The rows of a tensor that an actor rank owns; of few rows the last ranks have none."""
    share = -(-SHAPES[name][0] // num_parts)
    return min(index * share, SHAPES[name][0]), min((index + 1) * share, SHAPES[name][0])


def part_of(layout, index, num_parts):
    runs = []
    for entry in layout.entries:
        first, last = rows_of(entry.name, index, num_parts)
        runs += [ShardRun(entry, low - first, high - first, at, end) for low, high, at, end in entry.runs(first, last)]
    return WeightShard(layout, index, num_parts, tuple(runs)) if num_parts > 1 else WeightShard.whole(layout)


def whole_runs(layout):
    return [ShardRun(entry, *run) for entry in layout.entries for run in entry.runs(0, SHAPES[entry.name][0])]


class DeviceScene:
    """The ranks of an actor with buffers on their devices, and the slots of a relay."""

    def __init__(self, num_parts=1, tp=1):
        self.network, self.num_parts = MemoryNetwork(), num_parts
        self.layout = Layout.of(weights(0), "float32", tp, SPLITS)
        self.relay = VersionSlots(Segment.create_anonymous())
        self.relay.prepare(self.layout.num_bytes, self.layout.fingerprint)
        at_end(self.relay.close)
        self.ranks = [self.rank(index) for index in range(num_parts)]

    def rank(self, index, incarnation=1, host="here"):
        fleet = MemoryFleet.join_network(self.network, "actor", index, host=host)
        rank = DeviceVersions(fleet, part_of(self.layout, index, self.num_parts), incarnation, CPU)
        at_end(rank.close)
        return rank

    def reader(self, tp_rank=0):
        fleet = MemoryFleet.join_network(self.network, "rollout")
        reader = DeviceVersionReader(fleet, self.layout, tp_rank, self.relay)
        at_end(reader.close)
        return reader

    def write(self, version, ranks=None):
        for index, rank in enumerate(ranks or self.ranks):
            rank.write(version, {n: w[slice(*rows_of(n, index, self.num_parts))] for n, w in weights(version).items()})

    def store(self, version, incarnation=1):
        """Have the relay hold the version."""
        write = self.relay.begin(version)
        assert write is not None
        self.layout.write(weights(version), write.buffer)
        self.relay.commit(write, "0", incarnation)
        stored = self.relay.find(version)
        assert stored is not None
        return stored

    def publish(self, version):
        self.write(version)
        return self.store(version)


def read(reader, stored, scene, tp_rank=0):
    """The tensors that a reader copies; None if it copies none."""
    own = scene.layout.of_rank(tp_rank)
    into = torch.zeros(own.num_bytes, dtype=torch.uint8)
    return own.views(into) if reader.read(stored, into) else None


def is_version(views, version):
    return views is not None and all(torch.equal(views[name], tensor) for name, tensor in weights(version).items())


@pytest.mark.parametrize("num_parts", [1, 2, 6])
@pytest.mark.parametrize("tp", [1, 2])
def test_each_rank_of_a_rollout_copies_what_it_takes_from_all_ranks_of_the_actor(num_parts, tp):
    scene = DeviceScene(num_parts, tp)
    readers = [scene.reader(rank) for rank in range(tp)]
    for version in (1, 2, 3):
        stored = scene.publish(version)
        expected = scene.relay.segment.slot(stored.slot)
        for rank, reader in enumerate(readers):
            into = torch.full((scene.layout.of_rank(rank).num_bytes,), 0, dtype=torch.uint8)
            assert reader.read(stored, into)
            spans = [expected[start:end] for start, end in scene.layout.spans_of(rank)]
            assert np.array_equal(into.numpy(), np.concatenate(spans))


def test_the_two_newest_versions_are_on_the_device():
    scene = DeviceScene()
    reader, stored = scene.reader(), [scene.publish(version) for version in (1, 2, 3)]
    assert [is_version(read(reader, each, scene), each.version) for each in stored] == [False, True, True]


def test_a_version_that_one_rank_lacks_is_left_to_the_relay():
    scene = DeviceScene(num_parts=2)
    scene.publish(1)
    scene.write(2, scene.ranks[:1])
    assert read(scene.reader(), scene.store(2), scene) is None


def test_ranks_on_another_host_leave_all_to_the_relay():
    scene = DeviceScene(num_parts=2)
    scene.ranks[1] = scene.rank(1, host="there")
    assert read(scene.reader(), scene.publish(1), scene) is None


def test_of_replicas_a_rank_without_rows_is_not_needed_on_this_host_and_allocates_nothing(caplog):
    scene = DeviceScene()
    all_rows = WeightShard(scene.layout, 0, 2, tuple(whole_runs(scene.layout)))
    scene.ranks[0] = DeviceVersions(MemoryFleet.join_network(scene.network, "actor"), all_rows, 1, CPU)
    at_end(scene.ranks[0].close)
    there = MemoryFleet.join_network(scene.network, "actor", 1, host="there")
    publisher = WeightPublisher(there, scene.layout, SETTINGS, WeightShard(scene.layout, 1, 2, ()), 1)
    MemoryFleet.join_network(scene.network, "rollout", 1, host="there")
    assert publisher._device_versions(weights(1)) is None and not there.me.info
    assert is_version(read(scene.reader(), scene.publish(1), scene), 1) and not caplog.records


def test_an_actor_with_rows_on_two_hosts_allocates_nothing_and_says_so_once(caplog):
    scene = PublisherScene(weights(0))
    scene.join("rollout")
    there = MemoryFleet.join_network(scene.network, "actor", 1, host="there")
    WeightPublisher(there, scene.layout, SETTINGS)
    scene.publish(1)
    scene.publish(2)
    assert "device_weights" not in scene.actor.me.info
    messages = [record.message for record in caplog.records if "cuda_ipc" in record.message]
    assert messages == ["comm.cuda_ipc: weights take the way through the relay: actor-1 is on another host"]


def test_a_copy_of_a_version_that_was_overwritten_meanwhile_does_not_count():
    network, layout = MemoryNetwork(), Layout.of({"all": torch.zeros(1 << 19)}, "float32")
    actor = MemoryFleet.join_network(network, "actor")
    versions = DeviceVersions(actor, WeightShard.whole(layout), 1, CPU)
    relay = VersionSlots(Segment.create_anonymous())
    relay.prepare(layout.num_bytes, layout.fingerprint)
    for close in (relay.close, versions.close):
        at_end(close)
    reader = DeviceVersionReader(MemoryFleet.join_network(network, "rollout"), layout, 0, relay)
    at_end(reader.close)
    write = relay.begin(1)
    assert write is not None
    layout.write({"all": torch.full((1 << 19,), 1.0)}, write.buffer)
    relay.commit(write, "0")
    versions.write(1, {"all": torch.full((1 << 19,), 1.0)})
    into = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    stored = relay.newest_stored()
    assert stored is not None and reader.read(stored, into)
    is_over = threading.Event()

    def overwrite():
        version = 1
        while not is_over.is_set():
            version += 1
            versions.write(version, {"all": torch.full((1 << 19,), float(version))})

    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        for _ in range(300):
            stored = versions._slots.newest_stored()
            if stored is not None and reader.read(stored, into):
                assert (into.view(torch.float32) == stored.version).all()
    finally:
        is_over.set()
        thread.join(60)
    stored = versions._slots.newest_stored()
    assert stored is not None and reader.read(stored, into)


def test_a_version_of_another_incarnation_of_the_trainer_does_not_count():
    scene = DeviceScene()
    scene.write(1)
    assert read(scene.reader(), scene.store(1, incarnation=2), scene) is None


def test_a_trainer_that_starts_again_is_followed():
    scene = DeviceScene()
    reader = scene.reader()
    assert is_version(read(reader, scene.publish(1), scene), 1)
    scene.ranks = [scene.rank(0, incarnation=2)]
    scene.write(2)
    assert is_version(read(reader, scene.store(2, incarnation=2), scene), 2)
    assert read(reader, scene.relay.find(1), scene) is None


def test_the_buffers_of_a_dead_trainer_are_closed_and_those_of_one_that_only_seemed_dead_are_opened_again():
    scene = DeviceScene()
    reader, stored = scene.reader(), scene.publish(1)
    assert is_version(read(reader, stored, scene), 1)
    (part,) = reader._parts
    reader.close_dead()
    assert reader._parts == [part]
    with scene.network.lock:
        member = scene.network.members["actor-0"]
        scene.network.members["actor-0"] = msgspec.structs.replace(member, is_alive=False)
    reader.close_dead()
    assert not reader._parts and not reader.is_proven
    with scene.network.lock:
        scene.network.members["actor-0"] = member
    assert is_version(read(reader, stored, scene), 1)


def test_a_trainer_that_closes_has_no_version_any_more():
    scene = DeviceScene()
    reader, stored = scene.reader(), scene.publish(1)
    assert is_version(read(reader, stored, scene), 1)
    scene.ranks[0].close()
    assert read(reader, stored, scene) is None


def test_bytes_other_than_the_relay_s_end_the_copies_from_a_device(caplog):
    scene = DeviceScene()
    reader, stored = scene.reader(), scene.publish(1)
    scene.relay.segment.slot(stored.slot)[7] ^= 1
    assert read(reader, stored, scene) is None
    assert read(reader, scene.publish(2), scene) is None
    assert [r.message for r in caplog.records] == [
        "comm.cuda_ipc: version 1 on actor-0 has other bytes than the relay's"
    ]


def test_a_buffer_that_cannot_be_opened_is_told_once(caplog):
    scene = DeviceScene()
    reader, stored = scene.reader(), scene.publish(1)
    for buffer in scene.ranks[0]._buffers:
        buffer.close()
    assert read(reader, stored, scene) is None and read(reader, stored, scene) is None
    assert len(caplog.records) == 1 and "weights take the way through the relay" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_memory_of_a_gpu_cannot_be_opened_without_one(caplog):
    scene = DeviceScene()
    reader, stored = scene.reader(), scene.publish(1)
    slot = scene.ranks[0]._slots.segment.slot(0)
    text = slot.tobytes().rstrip(b"\0").decode()
    start, end = text.index('"/proc'), text.rindex('"')
    handle = '[0,"QUJD",64,0,"QUJD",0,"QUJD",true]'
    changed = (text[:start] + handle + text[end + 1 :]).encode()
    slot[: len(changed)], slot[len(changed) :] = np.frombuffer(changed, np.uint8), 0
    assert read(reader, stored, scene) is None
    assert "memory of a GPU that cannot be opened here" in caplog.text


# ----------------------------------------------------------------------------------------------- with a publisher


class PublisherScene:
    """An actor that publishes tensors, each plus the version, to a relay in the same process."""

    def __init__(self, tensors):
        self.network, self.tensors, self.layout = MemoryNetwork(), tensors, Layout.of(tensors, "float32")
        self.segment = Segment.create_anonymous()
        relay = self.join("relay", {"segment": self.segment.path})
        server = WeightServer(relay, self.segment, SETTINGS).start()
        self.slots, self.actor = server.version_store.slots, self.join("actor")
        self.publisher = WeightPublisher(self.actor, self.layout, SETTINGS)
        for close in (self.segment.close, server.close, self.publisher.close):
            at_end(close)

    def join(self, role, info=None, host="here"):
        return MemoryFleet.join_network(self.network, role, 0, info, SETTINGS, host)

    def weights_of(self, version):
        return {name: tensor + version for name, tensor in self.tensors.items()}

    def publish(self, version):
        """Publish a version and wait until the relay has it."""
        self.publisher.publish(version, self.weights_of(version))
        with waiting("the relay", "a version", 60) as wait:
            return wait.until(lambda: self.slots.find(version))


def test_a_version_published_by_way_of_the_device_has_the_same_digest():
    scene = PublisherScene(weights(0))
    scene.join("rollout")
    stored, plain = scene.publish(1), np.zeros(scene.layout.num_bytes, np.uint8)
    scene.layout.write(scene.weights_of(1), plain)
    assert "device_weights" in scene.actor.me.info and stored.digest == scene.layout.digest(plain)


def test_an_actor_without_a_rollout_on_its_host_keeps_nothing_on_its_device():
    scene = PublisherScene(weights(0))
    scene.join("rollout", host="there")
    scene.publish(1)
    assert "device_weights" not in scene.actor.me.info


def test_a_rollout_takes_its_weights_from_the_device_and_else_from_the_relay(tmp_path):
    scene, settings = PublisherScene(load_policy(path := tiny_policy(tmp_path)).weights()), SETTINGS
    policy = load_policy(path, weights=False)
    taken = RolloutWeights(scene.join("rollout"), policy, settings)
    at_end(taken.close)
    for version in (1, 2, 3):
        stored = scene.publish(version)
        if version == 2:  # the copies are proven: the relay's bytes are not read any more
            scene.segment.slot(stored.slot)[:] = 0
        if version == 3:
            scene.publisher.close()
            assert taken.pull_version(3) == (3, stored.digest)
        else:
            assert taken.pull(60) == (version, stored.digest)
        expected = scene.weights_of(version)
        assert all(torch.equal(weight, expected[name]) for name, weight in policy.weights().items())


def test_a_rollout_does_not_hash_versions_that_it_takes_from_the_device(tmp_path):
    scene = PublisherScene(load_policy(path := tiny_policy(tmp_path)).weights())
    taken = RolloutWeights(scene.join("rollout"), load_policy(path, weights=False), SETTINGS)
    at_end(taken.close)
    scene.publish(1)
    assert taken.newest() == 1
    taken.pull(60)
    checks = taken._reader._check
    stored = scene.publish(2)
    assert taken.newest() == 2 and taken._reader._check is checks
    scene.actor.crash()
    assert taken.newest() == 2 and taken._reader._check is not checks
    assert taken.pull(60) == (2, stored.digest)


ACTOR = """
import sys, torch
from headrace.comm.fleet import Fleet
from headrace.comm.recipe import CommSettings
from headrace.launch.processes.role_process import end_process
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher

fleet = Fleet.join(sys.argv[1], "actor", 0, b"s", {}, settings := CommSettings(heartbeat_s=0.02, cuda_ipc=True))
tensors = {"all": torch.full((1 << 20,), float(sys.argv[2]), device=sys.argv[3])}
publisher = WeightPublisher(fleet, Layout.of(tensors, "float32"), settings)
publisher.publish(int(sys.argv[2]), tensors)
sys.stdin.read()
end_process(0)
"""


def follows(rollout, incarnation):
    """Whether a rollout has heard of the buffers of this incarnation of the actor."""
    return incarnation in {member.incarnation for member in rollout.alive_members("actor", "device_weights")}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_a_rollout_copies_from_the_device_of_another_process_and_follows_its_restart(device):
    hosted, segment, layout = (
        StoreServer("127.0.0.1"),
        Segment.create_anonymous(),
        Layout.of({"all": torch.zeros(1 << 20)}, "float32"),
    )
    at_end(lambda: hosted)
    relay = Fleet.join(hosted.address, "relay", 0, b"s", {"segment": segment.path}, SETTINGS)
    rollout = Fleet.join(hosted.address, "rollout", 0, b"s", {}, SETTINGS)
    server = WeightServer(relay, segment, SETTINGS).start()
    slots = server.version_store.slots
    reader = DeviceVersionReader(rollout, layout, 0, slots)
    for close in (relay.leave, rollout.leave, segment.close, server.close, reader.close):
        at_end(close)
    into = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    for incarnation, version in ((1, 10), (2, 20)):
        command = [sys.executable, "-c", ACTOR, hosted.address, str(version), device]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as actor, waiting("actor-0", "its version", 60) as wait:
            stored = wait.until(partial(slots.find, version))
            wait.until(partial(follows, rollout, incarnation))
            assert reader.read(stored, into) and (into.view(torch.float32) == version).all()
            actor.kill()
