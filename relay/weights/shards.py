"""The bytes of the layout that one actor rank publishes: all of them, or the rows that it owns.

FSDP2 shards a tensor by rows, so a rank's share of a tensor is one byte range of the layout (of each slice, where rollouts
slice the tensor). All ranks together cover the layout, and no rank gathers rows of another. A part's bytes are its ranges
one after the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.messages.weights import Offer
from .byte_ranges import ByteRanges, chunk_digests
from .layout import Entry, Layout, local_tensor, num_rows


class ShardRun(NamedTuple):
    """Rows [low, high) of this rank's shard of a tensor, and the bytes [start, end) of the layout that they fill."""

    entry: Entry
    low: int
    high: int
    start: int
    end: int


@dataclass(frozen=True)
class WeightShard:
    """The share of one of `num_parts` actor ranks in a layout: the rows of its tensors that the rank owns."""

    layout: Layout
    index: int
    num_parts: int
    runs: tuple[ShardRun, ...]

    @staticmethod
    def whole(layout: Layout) -> "WeightShard":
        return WeightShard(layout, 0, 1, ())

    @staticmethod
    def of(layout: Layout, tensors: Mapping[str, Tensor], index: int, num_parts: int) -> "WeightShard":
        """The rows that this rank holds of DTensors sharded over `num_parts` ranks; rank 0 publishes what is not sharded.

        Raises `SettingError` for a sharding that is not by rows.
        """
        if num_parts == 1:
            return WeightShard.whole(layout)
        owned = {entry.name: _owned_rows(tensors[entry.name], index) for entry in layout.entries}
        runs = [
            ShardRun(entry, low - owned[entry.name][0], high - owned[entry.name][0], start, end)
            for entry in layout.entries
            for low, high, start, end in entry.runs(*owned[entry.name])
        ]
        return WeightShard(layout, index, num_parts, tuple(runs))

    @cached_property
    def ranges(self) -> ByteRanges:
        if self.num_parts == 1:
            return ByteRanges(((0, self.layout.num_bytes),))
        return ByteRanges(tuple((run.start, run.end) for run in self.runs))

    @property
    def num_bytes(self) -> int:
        return self.ranges.num_bytes

    def offer(self, version: int, incarnation: int, slot: int = 0) -> Offer:
        """The offer of this part of a version, which this incarnation of the trainer made and has in a slot of its memory."""
        layout = self.layout
        spans = () if self.num_parts == 1 else self.ranges.spans
        return Offer(
            version, layout.num_bytes, layout.fingerprint, self.num_parts, self.index, spans, incarnation, slot
        )

    def write(self, tensors: Mapping[str, Tensor], buffer: np.ndarray) -> None:
        """Cast and copy this rank's rows into a buffer of the part's bytes, uint8 [num_bytes]."""
        if self.num_parts == 1:
            self.layout.write(tensors, buffer)
            return
        shards = {run.entry.name: local_tensor(tensors[run.entry.name]) for run in self.runs}
        for run, (at, end) in zip(self.runs, pairwise(self.ranges.starts), strict=True):
            run.entry.write(shards[run.entry.name], run.low, run.high, buffer[at:end])
        if any(shard.is_cuda for shard in shards.values()):
            torch.cuda.synchronize()

    def chunk_digests(self, buffer: np.ndarray) -> Iterator[bytes]:
        """The digests of the part's chunks, which `join_digests` joins, in a buffer of the part's bytes, uint8 [num_bytes]."""
        return chunk_digests(buffer, pairwise(self.ranges.starts))


def held_rows(tensor: Tensor) -> tuple[int, int]:
    """The rows [low, high) of a tensor that this rank holds: all of a plain tensor, its shard of a DTensor.

    Raises `SettingError` for a sharding that is not by rows.
    """
    if not hasattr(tensor, "to_local"):
        return 0, num_rows(tensor)
    # This import takes a second, so it happens only where there are shards.
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name

    assert isinstance(tensor, DTensor)
    if any(isinstance(placement, Shard) and placement.dim != 0 for placement in tensor.placements):
        raise SettingError(f"a tensor is sharded by {tensor.placements}: actor ranks must shard by rows (FSDP2)")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]) if all(shape) else (0, 0)


def _owned_rows(tensor: Tensor, index: int) -> tuple[int, int]:
    """The rows that this rank publishes: of replicas, those of the first."""
    if not hasattr(tensor, "to_local"):
        return (0, num_rows(tensor)) if index == 0 else (0, 0)
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    coordinates = tensor.device_mesh.get_coordinate() or ()
    is_copy = any(
        isinstance(placement, Replicate) and coordinate > 0
        for placement, coordinate in zip(tensor.placements, coordinates, strict=True)
    )
    return (0, 0) if is_copy else held_rows(tensor)
