"""The flat layout of a model's weights: the offset of each tensor in one byte buffer, the same in all processes.

Tensors keep the order given, aligned to 64 bytes, zero padded; tied weights are stored once. Floating tensors take the
layout's dtype, others keep theirs.

For rollouts of `tp` ranks each, the tensors that all ranks hold come first, then the slices of rank 0, of rank 1 and so on:
one rank takes two ranges of bytes, and a row shard of a tensor that is sliced by columns is one range in each rank's slices.

An actor rank publishes all of the layout's bytes or, where FSDP2 shards tensors by rows, those of the rows that it owns: one
byte range for each tensor (for each slice, where rollouts slice the tensor). All ranks together cover the layout, and no rank
gathers rows of another. A part's bytes are its ranges one after the other.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...comm.errors import SettingError, WrongDigest
from ...comm.messages.weights import Offer
from ...comm.tensor_split import TensorSplit
from .byte_ranges import ByteRanges, chunk_digests, digest

ALIGNMENT = 64
_SHARED = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of one tensor, or of one rank's slice of it: `shape` is that of the slice."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    rows: tuple[tuple[int, int], ...]
    """The rows [start, end) of the tensor that this entry holds, one run after the other; a scalar has one row."""
    columns: tuple[int, int] | None = None
    """The columns that this entry holds; None for all."""
    rank: int = _SHARED
    """The rank that takes this slice; -1 for a tensor that all ranks hold."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor or slice, padding excluded."""
        return math.prod(self.shape) * self.dtype.itemsize

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """(row, end of rows, byte, end of bytes) of each run of the tensor's rows [first, last) that this entry holds."""
        row_bytes = self.num_bytes // max(1, self.shape[0] if self.shape else 1)
        at = self.offset
        for start, end in self.rows:
            low = max(first, start)
            high = min(last, end)
            if low < high:
                yield low, high, at + (low - start) * row_bytes, at + (high - start) * row_bytes
            at += (end - start) * row_bytes

    @torch.no_grad()
    def write(self, tensor: Tensor, low: int, high: int, buffer: np.ndarray) -> None:
        """Cast and copy rows [low, high) of a tensor that has all columns into the bytes of one run.

        From a GPU the copy may still be running on return.
        """
        rows = (tensor if tensor.dim() else tensor[None])[low:high]
        part = rows if self.columns is None else rows[:, slice(*self.columns)]
        if part.dtype == self.dtype and part.device.type == "cpu" and part.is_contiguous():
            np.copyto(buffer, part.detach().reshape(-1).view(torch.uint8).numpy())  # twice as fast as `copy_`
        else:
            torch.from_numpy(buffer).view(self.dtype).view(part.shape).copy_(part, non_blocking=True)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model in one buffer of `num_bytes` bytes; `aliases` maps further names of tied weights to the first."""

    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    num_bytes: int
    tp: int = 1

    @staticmethod
    def of(
        named_tensors: Mapping[str, Tensor],
        dtype: torch.dtype | str,
        tp: int = 1,
        splits: Mapping[str, TensorSplit] | None = None,
    ) -> "Layout":
        """The layout of these tensors; their values do not matter, and any device will do, meta included.

        `splits` are the tensors that the `tp` ranks of a rollout share; each rank holds the others whole.
        """
        wanted: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        first_names: dict[tuple[object, ...], str] = {}
        aliases: dict[str, str] = {}
        for name, tensor in named_tensors.items():
            first = first_names.setdefault(_identity(tensor), name)
            if first != name:
                aliases[name] = first
        splits = {name: split for name, split in (splits or {}).items() if tp > 1}
        entries = []
        offset = 0
        for rank in (_SHARED, *range(tp if splits else 0)):
            for name in first_names.values():
                if (name in splits) == (rank != _SHARED):
                    entry = _entry(name, named_tensors[name], wanted, offset, splits.get(name), rank, tp)
                    entries.append(entry)
                    offset += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
        return Layout(tuple(entries), aliases, offset, tp)

    def spans_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The byte ranges [start, end) that one rank of a rollout takes."""
        starts = {r: next((e.offset for e in self.entries if e.rank == r), self.num_bytes) for r in (0, rank, rank + 1)}
        spans = ((0, starts[0]), (starts[rank], starts[rank + 1]))
        return tuple((start, end) for start, end in spans if end > start)

    def of_rank(self, rank: int) -> "Layout":
        """The layout of a buffer that holds `spans_of(rank)`, one after the other."""
        spans = self.spans_of(rank)
        back = spans[-1][0] - (spans[0][1] if len(spans) > 1 else 0)
        entries = tuple(
            replace(e, offset=e.offset - (0 if e.rank == _SHARED else back))
            for e in self.entries
            if e.rank in (_SHARED, rank)
        )
        return Layout(entries, self.aliases, sum(end - start for start, end in spans))

    @cached_property
    def fingerprint(self) -> int:
        """63 bits over the manifest: two processes compare them to know that their layouts are equal."""
        manifest = [f"{e.name} {e.dtype} {e.shape} {e.offset} {e.rank} {e.rows} {e.columns}" for e in self.entries]
        return xxhash.xxh3_64_intdigest("\n".join(manifest).encode()) >> 1

    def digest(self, buffer: np.ndarray) -> str:
        return digest(buffer)

    def views(self, buffer: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Each tensor as a view into the buffer (uint8 [num_bytes], on any device), tied weights under all their names.

        A layout for several ranks has no views; the layout of one of them has: `of_rank`.
        """
        assert self.tp == 1, "a layout for several ranks has no views: use `of_rank`"
        flat = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
        assert flat.dtype == torch.uint8 and flat.shape == (self.num_bytes,), (flat.dtype, flat.shape)
        views = {e.name: flat[e.offset : e.offset + e.num_bytes].view(e.dtype).view(e.shape) for e in self.entries}
        return views | {alias: views[name] for alias, name in self.aliases.items()}

    def write(self, tensors: Mapping[str, Tensor], buffer: np.ndarray) -> None:
        """Cast and copy all tensors to their places in the buffer. Raises `KeyError` for a missing one."""
        for entry in self.entries:
            tensor = tensors[entry.name]
            for low, high, start, end in entry.runs(0, num_rows(tensor)):
                entry.write(tensor, low, high, buffer[start:end])
        if any(tensors[entry.name].is_cuda for entry in self.entries):
            torch.cuda.synchronize()

    def check(self, fingerprint: int, owner: str) -> None:
        """Raise `WrongDigest` unless `owner`, whose layout has this fingerprint, has the same layout."""
        if fingerprint != self.fingerprint:
            raise WrongDigest(
                f"{owner} serves weights of another layout: is `model.path`, `model.dtype` or `rollout.tp` not the same?"
            )


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
            self.layout.write({name: local_tensor(tensor) for name, tensor in tensors.items()}, buffer)
            return
        shards = {run.entry.name: local_tensor(tensors[run.entry.name]) for run in self.runs}
        for run, (at, end) in zip(self.runs, pairwise(self.ranges.starts), strict=True):
            run.entry.write(shards[run.entry.name], run.low, run.high, buffer[at:end])
        if any(shard.is_cuda for shard in shards.values()):
            torch.cuda.synchronize()

    def chunk_digests(self, buffer: np.ndarray) -> Iterator[bytes]:
        """The digests of the part's chunks, which `join_digests` joins, in a buffer of the part's bytes, uint8 [num_bytes]."""
        return chunk_digests(buffer, pairwise(self.ranges.starts))


def local_tensor(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that this rank holds; any other tensor as it is."""
    # An isinstance check would load torch.distributed.tensor, which takes a second of each process's start.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def num_rows(tensor: Tensor) -> int:
    """Rows of a tensor; a scalar has one."""
    return tensor.shape[0] if tensor.dim() else 1


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


def _entry(
    name: str, tensor: Tensor, dtype: torch.dtype, offset: int, split: TensorSplit | None, rank: int, tp: int
) -> Entry:
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    shape = tuple(tensor.shape)
    if split is None:
        return Entry(name, kind, shape, offset, ((0, num_rows(tensor)),))
    rows, columns = split.slice_for_rank(shape, rank, tp)
    width = shape[1:] if columns is None else (columns[1] - columns[0], *shape[2:])
    return Entry(name, kind, (sum(end - start for start, end in rows), *width), offset, rows, columns, rank)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    local = local_tensor(tensor)
    if local.device.type == "meta" or local.numel() == 0:
        return (id(tensor),)
    return (local.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


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
