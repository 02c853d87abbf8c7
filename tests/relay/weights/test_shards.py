"""Byte ranges and shards: sharded actor ranks publish the bytes of a single one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import sharded_model
from support.closing import at_end
from support.sharded_model import CUTS, build

from headrace.comm.fleet import Fleet
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.store import StoreServer
from headrace.comm.waits import waiting
from headrace.relay.weights.byte_ranges import ByteRanges
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.reader import WeightReader
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.shards import WeightShard

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


ACTOR = """
import sys, torch
sys.path.insert(0, sys.argv[6])
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from support.sharded_model import CUTS, build
from headrace.comm.fleet import Fleet
from headrace.comm.recipe import CommSettings
from headrace.comm.store import connect_store
from headrace.launch.processes.role_process import end_process
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.shards import WeightShard
from headrace.relay.weights.publisher import WeightPublisher

address, rank, size, link, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
tp = int(sys.argv[7])
settings = CommSettings(link=link, heartbeat_s=0.02, deadline_s=240)
model = build()
if size > 1:
    store = dist.PrefixStore(f"actor/{size}", connect_store(address, 240))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    fully_shard(model)
fleet = Fleet.join(address, "actor", rank, b"s", {}, settings)
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
    hosted = StoreServer("127.0.0.1")
    settings = CommSettings(link=link, heartbeat_s=0.02, deadline_s=240)
    segment = Segment.create_anonymous()
    relay = Fleet.join(hosted.address, "relay", 0, b"s", {"segment": segment.path}, settings)
    rollout = Fleet.join(hosted.address, "rollout", 0, b"s", {}, settings)
    server = WeightServer(relay, segment, settings).start()
    at_end(lambda: hosted)  # holds the store until its members have left
    for close in (relay.leave, rollout.leave, segment.close, server.close):
        at_end(close)
    layout = Layout.of(build().state_dict(), dtype, tp, CUTS)
    readers = [WeightReader(rollout, layout, settings, tp_rank=0)]
    here = str(Path(sharded_model.__file__).parents[1])
    arguments = [[hosted.address, str(rank), str(num_ranks), link, dtype, here, str(tp)] for rank in range(num_ranks)]
    actors = [subprocess.Popen([sys.executable, "-c", ACTOR, *each]) for each in arguments]
    try:
        with waiting("the actors", "version 2", 240) as wait:
            wait.until(lambda: readers[0].newest() == 2 or any(actor.poll() for actor in actors))
        if link == "auto":
            readers += [WeightReader(rollout, layout, settings, tp_rank=rank) for rank in range(1, tp)]
        taken = [np.zeros(layout.of_rank(rank).num_bytes, np.uint8) for rank in range(len(readers))]
        receipts = {reader.pull(into, 60) for reader, into in zip(readers, taken, strict=True)}
        assert len(receipts) == 1
        return receipts.pop().digest, taken
    finally:
        assert [actor.wait(240) for actor in actors] == [0] * num_ranks
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
