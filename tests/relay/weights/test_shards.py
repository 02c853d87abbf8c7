"""Byte ranges and shards: sharded actor ranks publish the bytes of a single one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import forks, sharded_model
from support.closing import at_end
from support.sharded_model import CUTS, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.comm.fleet import StoreFleet
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.store.server import StoreServer
from headrace.comm.waits import waiting
from headrace.relay.weights.byte_ranges import ByteRanges
from headrace.relay.weights.layout import Layout, WeightShard
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer

spans = st.lists(st.integers(1, 50), min_size=2, max_size=12).map(
    lambda gaps: tuple(zip(np.cumsum(gaps)[::2].tolist(), np.cumsum(gaps)[1::2].tolist(), strict=False))
)


@given(spans, st.integers(0, 400), st.integers(1, 60))
def test_pieces_of_ranges_cover_the_stream_once_and_in_order(spans, at, most):
    ranges = ByteRanges(spans)
    buffer = np.arange(700) % 251
    stream = np.concatenate([buffer[start:end] for start, end in spans])
    pieces = list(ranges.chunks(at, most))
    assert all(end - start <= most for _, start, end in pieces)
    assert [offset for offset, _, _ in pieces] == list(np.cumsum([at] + [e - s for _, s, e in pieces])[:-1])
    read = np.concatenate([buffer[start:end] for _, start, end in pieces] or [buffer[:0]])
    assert np.array_equal(read, stream[at:])


def test_a_single_rank_publishes_everything_padding_included():
    layout = Layout.of({"a": torch.zeros(3), "b": torch.zeros(5)}, "float32")
    part = WeightShard.of(layout, {}, 0, 1)
    assert part.ranges.spans == ((0, layout.num_bytes),)


def test_rank_0_alone_publishes_tensors_that_are_not_sharded():
    tensors = {"a": torch.zeros(3), "scalar": torch.tensor(1.0)}
    layout = Layout.of(tensors, "float32")
    assert WeightShard.of(layout, tensors, 0, 2).ranges.spans == ((0, 12), (64, 68))
    assert WeightShard.of(layout, tensors, 1, 2).num_bytes == 0


def ranks_with_two_copies() -> Iterator[dict[str, torch.Tensor]]:
    """The weights as each of four ranks holds them that keep two copies of the model (HSDP).

    No rank talks to another one, so a group in name alone will do.
    """
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)  # pyright: ignore[reportPrivateImportUsage]
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            yield {
                name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)], src_data_rank=None)
                for name, tensor in build().state_dict().items()
            }
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("tp", [1, 2])
def test_of_ranks_that_hold_two_copies_the_first_copy_is_published_each_byte_once(tp: int):
    whole = build().state_dict()
    layout = Layout.of(whole, "float32", tp, CUTS)
    alone, found = np.zeros(layout.num_bytes, np.uint8), np.zeros(layout.num_bytes, np.uint8)
    layout.write(whole, alone)
    times, num_bytes = np.zeros(layout.num_bytes, np.uint8), list[int]()
    for rank, tensors in enumerate(ranks_with_two_copies()):
        part = WeightShard.of(layout, tensors, rank, 4)
        written = np.zeros(part.num_bytes, np.uint8)
        part.write(tensors, written)
        for at, start, end in part.ranges.chunks(0, layout.num_bytes):
            found[start:end] = written[at : at + end - start]
            times[start:end] += 1
        num_bytes.append(part.num_bytes)
    is_padding = np.ones(layout.num_bytes, bool)
    for entry in layout.entries:
        is_padding[entry.offset : entry.offset + entry.num_bytes] = False
    assert np.array_equal(times, np.where(is_padding, 0, 1)) and np.array_equal(found, alone)
    assert min(num_bytes[:2]) > 0 and num_bytes[2:] == [0, 0]


def test_a_single_rank_publishes_the_weights_that_it_shards_with_itself_alone():
    whole = build().state_dict()
    layout = Layout.of(whole, "float32")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensors = {name: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) for name, x in whole.items()}
        alone, found = (np.zeros(layout.num_bytes, np.uint8) for _ in range(2))
        layout.write(whole, alone)
        WeightShard.of(layout, tensors, 0, 1).write(tensors, found)
    finally:
        dist.destroy_process_group()
    assert np.array_equal(found, alone) and found.any()


ACTOR = """
import sys, torch
sys.path.insert(0, sys.argv[6])
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from support.sharded_model import CUTS, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from headrace.comm.fleet import StoreFleet
from headrace.comm.recipe import CommSettings
from headrace.comm.links.process_group import meeting_store
from headrace.launch.processes.role_process import end_process
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.layout import WeightShard
from headrace.relay.weights.publisher import WeightPublisher

address, rank, size, link, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
tp = int(sys.argv[7])
settings = CommSettings(link=link, deadline_s=240)
model = build()
fleet = StoreFleet.join(address, "actor", rank, b"s", {}, settings)
if size > 1:
    store = meeting_store(fleet.store, "127.0.0.1", f"actor/{size}", 240, is_host=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    fully_shard(model)
fleet.wait_for("relay", 1, 240)
tensors = dict(model.state_dict())
layout = Layout.of(tensors, dtype, tp, CUTS)
publisher = WeightPublisher(fleet, layout, settings, WeightShard.of(layout, tensors, rank, size)).start()
for version in (1, 2):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    publisher.publish(version, dict(model.state_dict()))
publisher.close()
fleet.leave()
if size > 1:
    dist.destroy_process_group()
end_process(0)
"""


def published_by(num_ranks, link, dtype, tp):
    """The digest of version 2 and the bytes that each rank of a replica has, when `num_ranks` actor ranks publish it."""
    hosted = StoreServer("127.0.0.1", b"s").start()
    settings = CommSettings(link=link, deadline_s=240)
    segment = Segment.create_anonymous()
    relay = StoreFleet.join(hosted.address, "relay", 0, b"s", {"segment": segment.path}, settings)
    rollout = StoreFleet.join(hosted.address, "rollout", 0, b"s", {}, settings)
    server = WeightServer(relay, segment, settings).start()
    at_end(hosted.close)
    for close in (relay.leave, rollout.leave, segment.close, server.close):
        at_end(close)
    layout = Layout.of(build().state_dict(), dtype, tp, CUTS)
    readers = [WeightReader(rollout, layout, settings, tp_rank=0)]
    here = str(Path(sharded_model.__file__).parents[1])
    arguments = [[hosted.address, str(rank), str(num_ranks), link, dtype, here, str(tp)] for rank in range(num_ranks)]
    actors = [forks.start(ACTOR, each) for each in arguments]
    try:
        with waiting("the actors", "version 2", 240) as wait:
            wait.until(lambda: readers[0].newest() == 2 or any(actor.exitcode for actor in actors))
        if link == "auto":
            readers += [WeightReader(rollout, layout, settings, tp_rank=rank) for rank in range(1, tp)]
        taken = [np.zeros(layout.of_rank(rank).num_bytes, np.uint8) for rank in range(len(readers))]
        receipts = {reader.pull(into, 60) for reader, into in zip(readers, taken, strict=True)}
        assert len(receipts) == 1
        return receipts.pop().digest, taken
    finally:
        for actor in actors:
            actor.join(240)
        assert [actor.exitcode for actor in actors] == [0] * num_ranks
        for reader in readers:
            reader.close()


@pytest.mark.parametrize(
    ("num_ranks", "link", "dtype", "tp"),
    [
        (2, "auto", "float32", 1),
        (2, "auto", "bfloat16", 2),
        pytest.param(4, "tcp", "bfloat16", 1, marks=pytest.mark.slow),
        pytest.param(4, "tcp", "float32", 2, marks=pytest.mark.slow),
    ],
)
def test_sharded_ranks_publish_the_same_bytes_as_a_single_one(num_ranks, link, dtype, tp):
    model = build()
    for _ in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    layout = Layout.of(model.state_dict(), dtype, tp, CUTS)
    alone = np.zeros(layout.num_bytes, np.uint8)
    WeightShard.of(layout, {}, 0, 1).write(model.state_dict(), alone)
    digest, taken = published_by(num_ranks, link, dtype, tp)
    assert digest == layout.digest(alone)
    for rank, bytes_of_rank in enumerate(taken):
        assert np.array_equal(bytes_of_rank, np.concatenate([alone[a:b] for a, b in layout.spans_of(rank)]))
