"""Which bytes of the layout one actor rank brings: all of them, or the rows that it owns.

FSDP2 shards a tensor by rows, so a rank's share of a tensor is one byte range of the layout, and all ranks together cover
it without any of them gathering what is not its own. A part's bytes are its ranges one after the other.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..comm.errors import SettingError
from .digests import digest_of_ranges
from .layout import Entry, Layout, local_tensor, write_tensor


@dataclass(frozen=True)
class Ranges:
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

    def pieces(self, at: int, most: int) -> Iterator[tuple[int, int, int]]:
        """From byte `at` of the stream on: (at, start, end) of pieces of at most `most` bytes, each within one range."""
        while at < self.num_bytes:
            start, end = self.locate(at)
            end = min(end, start + most)
            yield at, start, end
            at += end - start


@dataclass(frozen=True)
class Part:
    """What one of `num_parts` actor ranks brings of a layout: rows [first, last) of some of its tensors."""

    layout: Layout
    index: int
    num_parts: int
    rows: tuple[tuple[Entry, int, int], ...]

    @staticmethod
    def whole(layout: Layout) -> "Part":
        """Everything, from the one rank there is."""
        return Part(layout, 0, 1, ())

    @staticmethod
    def of(layout: Layout, tensors: Mapping[str, Tensor], index: int, num_parts: int) -> "Part":
        """The rows that this rank holds of DTensors sharded over `num_parts` ranks; what is not sharded comes from rank 0.

        Raises `SettingError` for a sharding that is not by rows.
        """
        if num_parts == 1:
            return Part.whole(layout)
        rows = []
        for entry in layout.entries:
            first, last = _owned_rows(entry, tensors[entry.name], index)
            if last > first:
                rows.append((entry, first, last))
        return Part(layout, index, num_parts, tuple(rows))

    @cached_property
    def ranges(self) -> Ranges:
        """The part's byte ranges in the layout."""
        if self.num_parts == 1:
            return Ranges(((0, self.layout.num_bytes),))
        return Ranges(tuple(_byte_range(entry, first, last) for entry, first, last in self.rows))

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.ranges.num_bytes

    def write(self, tensors: Mapping[str, Tensor], buffer: np.ndarray) -> None:
        """Cast and copy this rank's rows into a buffer of the part's bytes, uint8 [num_bytes]."""
        if self.num_parts == 1:
            self.layout.write(tensors, buffer)
            return
        for (entry, _, _), (at, end) in zip(self.rows, pairwise(self.ranges.starts), strict=True):
            write_tensor(local_tensor(tensors[entry.name]), buffer[at:end], entry.dtype)
        if any(local_tensor(tensors[entry.name]).is_cuda for entry, _, _ in self.rows):
            torch.cuda.synchronize()

    def digest(self, buffer: np.ndarray) -> str:
        """The digest of the part in a buffer of its own."""
        starts = self.ranges.starts
        return digest_of_ranges(buffer, pairwise(starts))


def _owned_rows(entry: Entry, tensor: Tensor, index: int) -> tuple[int, int]:
    # Loaded only where there are shards: it takes a second.
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # it has no public name

    num_rows = entry.shape[0] if entry.shape else 1
    if not isinstance(tensor, DTensor):
        return (0, num_rows) if index == 0 else (0, 0)
    for placement, coordinate in zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True):
        if isinstance(placement, Replicate) and coordinate > 0:
            return 0, 0
        if isinstance(placement, Shard) and placement.dim != 0:
            raise SettingError(f"{entry.name} is sharded by {placement}: actor ranks have to shard by rows (FSDP2)")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]) if all(shape) else (0, 0)


def _byte_range(entry: Entry, first: int, last: int) -> tuple[int, int]:
    row_bytes = entry.num_bytes // (entry.shape[0] if entry.shape else 1)
    return entry.offset + first * row_bytes, entry.offset + last * row_bytes
