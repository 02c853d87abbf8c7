"""Which bytes of the layout one actor rank brings: all of them, or the rows that it owns.

FSDP2 shards a tensor by rows, so a rank's share of a tensor is one byte range of the layout (of each slice, where rollouts
slice the tensor), and all ranks together cover it without any of them gathering what is not its own. A part's bytes are its
ranges one after the other.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError
from .digests import digest_of_ranges
from .layout import Entry, Layout, local_tensor, num_rows


@dataclass(frozen=True)
class ByteRanges:
    """Byte ranges [start, end) of a buffer, in order, read as one stream."""

    spans: tuple[tuple[int, int], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in the stream each range begins, and last the length of the stream."""
        return tuple(accumulate((end - start for start, end in self.spans), initial=0))

    @property
    def num_bytes(self) -> int:
        """Length of the stream."""
        return self.starts[-1]

    def locate(self, at: int) -> tuple[int, int]:
        """Where in the buffer byte `at` of the stream lies, and the end of its range; the end of the last at the end."""
        if at >= self.num_bytes:
            end = self.spans[-1][1] if self.spans else 0
            return end, end
        index = bisect_right(self.starts, at) - 1
        start, end = self.spans[index]
        return start + at - self.starts[index], end

    def chunks(self, at: int, most: int) -> Iterator[tuple[int, int, int]]:
        """From byte `at` of the stream on: (at, start, end) of pieces of at most `most` bytes, each within one range."""
        while at < self.num_bytes:
            start, end = self.locate(at)
            end = min(end, start + most)
            yield at, start, end
            at += end - start


class ShardRun(NamedTuple):
    """Rows [low, high) of what this rank holds of a tensor, and the bytes [start, end) of the layout that they fill."""

    entry: Entry
    low: int
    high: int
    start: int
    end: int


@dataclass(frozen=True)
class WeightShard:
    """What one of `num_parts` actor ranks brings of a layout: the rows that it owns of some of its tensors."""

    layout: Layout
    index: int
    num_parts: int
    runs: tuple[ShardRun, ...]

    @staticmethod
    def whole(layout: Layout) -> "WeightShard":
        """Everything, from the one rank there is."""
        return WeightShard(layout, 0, 1, ())

    @staticmethod
    def of(layout: Layout, tensors: Mapping[str, Tensor], index: int, num_parts: int) -> "WeightShard":
        """The rows that this rank holds of DTensors sharded over `num_parts` ranks; what is not sharded comes from rank 0.

        Raises `SettingError` for a sharding that is not by rows.
        """
        if num_parts == 1:
            return WeightShard.whole(layout)
        owned = {entry.name: _owned_rows(entry.name, tensors[entry.name], index) for entry in layout.entries}
        runs = [
            ShardRun(entry, low - owned[entry.name][0], high - owned[entry.name][0], start, end)
            for entry in layout.entries
            for low, high, start, end in entry.runs(*owned[entry.name])
        ]
        return WeightShard(layout, index, num_parts, tuple(runs))

    @cached_property
    def ranges(self) -> ByteRanges:
        """The part's byte ranges in the layout."""
        if self.num_parts == 1:
            return ByteRanges(((0, self.layout.num_bytes),))
        return ByteRanges(tuple((run.start, run.end) for run in self.runs))

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.ranges.num_bytes

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

    def digest(self, buffer: np.ndarray) -> str:
        """The digest of the part in a buffer of its own."""
        starts = self.ranges.starts
        return digest_of_ranges(buffer, pairwise(starts))


def _owned_rows(name: str, tensor: Tensor, index: int) -> tuple[int, int]:
    # Loaded only where there are shards: it takes a second.
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # it has no public name

    if not isinstance(tensor, DTensor):
        return (0, num_rows(tensor)) if index == 0 else (0, 0)
    for placement, coordinate in zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True):
        if isinstance(placement, Replicate) and coordinate > 0:
            return 0, 0
        if isinstance(placement, Shard) and placement.dim != 0:
            raise SettingError(f"{name} is sharded by {placement}: actor ranks have to shard by rows (FSDP2)")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]) if all(shape) else (0, 0)
