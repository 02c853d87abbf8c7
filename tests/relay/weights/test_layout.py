"""The layout of a model's weights in one buffer, for one rank and for several."""

import numpy as np
import pytest
import torch

from headrace.comm.errors import WrongDigest
from headrace.comm.tensor_split import TensorSplit
from headrace.relay.weights.byte_ranges import GRID_BYTES, digest
from headrace.relay.weights.layout import ALIGNMENT, Layout


def tensors():
    torch.manual_seed(0)
    embed = torch.randn(7, 5)
    return {
        "embed": embed,
        "norm": torch.randn(3),
        "head": embed,
        "steps": torch.arange(4),
        "scalar": torch.tensor(2.5),
    }


def test_tied_weights_are_stored_once():
    layout = Layout.of(tensors(), torch.float32)
    assert [e.name for e in layout.entries] == ["embed", "norm", "steps", "scalar"]
    assert layout.aliases == {"head": "embed"}
    views = layout.views(np.zeros(layout.num_bytes, np.uint8))
    assert views["head"].data_ptr() == views["embed"].data_ptr()


def test_tensors_are_aligned_and_do_not_overlap():
    layout = Layout.of(tensors(), torch.float32)
    ends = [e.offset + e.num_bytes for e in layout.entries]
    assert all(e.offset % ALIGNMENT == 0 for e in layout.entries)
    assert all(end <= e.offset for end, e in zip(ends, layout.entries[1:], strict=False))
    assert ends[-1] <= layout.num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_views_show_the_tensors_that_were_written(dtype):
    layout = Layout.of(tensors(), dtype)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    layout.write(tensors(), buffer)
    for name, view in layout.views(buffer).items():
        source = tensors()[name]
        assert torch.equal(view, source.to(getattr(torch, dtype)) if source.is_floating_point() else source)


def test_a_transposed_tensor_is_written_in_its_own_order():
    layout = Layout.of({"w": torch.zeros(3, 2)}, torch.float32)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    source = torch.arange(6.0).view(2, 3).T
    layout.write({"w": source}, buffer)
    assert torch.equal(layout.views(buffer)["w"], source)


def test_the_layout_does_not_depend_on_the_device_of_the_tensors():
    real = {"a": torch.zeros(3, 2), "b": torch.ones(5)}
    meta = {name: tensor.to("meta") for name, tensor in real.items()}
    assert Layout.of(real, "bfloat16").fingerprint == Layout.of(meta, torch.bfloat16).fingerprint


def test_another_model_or_dtype_is_another_layout():
    layouts = [Layout.of(t, d) for t, d in ((tensors(), "float32"), (tensors(), "bfloat16"), ({}, "float32"))]
    assert len({layout.fingerprint for layout in layouts}) == 3
    with pytest.raises(WrongDigest, match="relay-0.*model.dtype"):
        layouts[0].check(layouts[1].fingerprint, "relay-0")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_digest_of_tensors_is_that_of_the_buffer_that_they_would_fill(tp: int):
    torch.manual_seed(1)
    large = {"wide": torch.randn(GRID_BYTES // 16, 6), "long": torch.randn(GRID_BYTES // 2 + 3), **tensors()}
    layout = Layout.of(large, torch.float32, tp, {"wide": TensorSplit(1)} if tp > 1 else None)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    layout.write(large, buffer)
    assert layout.digest_of(large) == layout.digest(buffer)
    large["norm"][0] += 1
    assert layout.digest_of(large) != layout.digest(buffer)


def test_the_digest_sees_every_chunk():
    buffer = np.zeros(2 * GRID_BYTES + 100, np.uint8)
    before = {digest(buffer)}
    for position in (0, GRID_BYTES, 2 * GRID_BYTES + 99):
        buffer[position] ^= 1
        before.add(digest(buffer))
    assert len(before) == 4
    assert all(len(d) == 32 for d in before)


CUTS = {"rows": TensorSplit(0), "columns": TensorSplit(1), "fused": TensorSplit(0, (4, 2))}


def shared_tensors():
    torch.manual_seed(0)
    return {
        "rows": torch.randn(6, 5),
        "norm": torch.randn(3),
        "columns": torch.randn(7, 4),
        "fused": torch.randn(6, 3),
        "scalar": torch.tensor(2.5),
    }


def test_each_rank_of_a_replica_takes_its_slices_and_the_shared_tensors():
    tensors = shared_tensors()
    layout = Layout.of(tensors, "float32", 2, CUTS)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    layout.write(tensors, buffer)
    for rank in range(2):
        spans = layout.spans_of(rank)
        mine = np.concatenate([buffer[start:end] for start, end in spans])
        views = layout.of_rank(rank).views(mine)
        assert len(spans) == 2 and mine.nbytes == layout.of_rank(rank).num_bytes
        assert torch.equal(views["norm"], tensors["norm"]) and torch.equal(views["scalar"], tensors["scalar"])
        assert torch.equal(views["rows"], tensors["rows"].chunk(2)[rank])
        assert torch.equal(views["columns"], tensors["columns"].chunk(2, 1)[rank])
        fused = torch.cat([block.chunk(2)[rank] for block in tensors["fused"].split([4, 2])])
        assert torch.equal(views["fused"], fused)


def test_one_rank_takes_everything_and_slices_change_the_fingerprint():
    tensors = shared_tensors()
    alone, both = Layout.of(tensors, "float32", 1, CUTS), Layout.of(tensors, "float32", 2, CUTS)
    assert alone.fingerprint == Layout.of(tensors, "float32").fingerprint != both.fingerprint
    assert alone.spans_of(0) == ((0, alone.num_bytes),)
    assert alone.of_rank(0) == alone
