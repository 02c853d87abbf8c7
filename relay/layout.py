"""The flat layout of a model's weights: where in one byte buffer each tensor lies, the same on all sides.

Tensors stand in the order given, aligned to 64 bytes, zero padded, tied weights once. Floating tensors take the layout's
dtype, others keep theirs. Digests run over a fixed grid of chunks, so that pieces can be checked as they arrive.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..comm.errors import WrongDigest
from .digests import digest

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, padding excluded."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All tensors of a model in one buffer of `num_bytes` bytes; `aliases` are further names of tied weights."""

    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    num_bytes: int

    @staticmethod
    def of(named_tensors: Mapping[str, Tensor], dtype: torch.dtype | str) -> "Layout":
        """The layout of these tensors; their values do not matter and they may live on any device, meta included."""
        wanted: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        entries, aliases, first_names, offset = [], {}, {}, 0
        for name, tensor in named_tensors.items():
            identity = _identity(tensor)
            if identity in first_names:
                aliases[name] = first_names[identity]
                continue
            first_names[identity] = name
            entry = Entry(name, wanted if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape), offset)
            entries.append(entry)
            offset += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
        return Layout(tuple(entries), aliases, offset)

    @cached_property
    def fingerprint(self) -> int:
        """What two processes compare to know that they mean the same layout: 63 bits over the manifest."""
        manifest = [f"{e.name} {e.dtype} {e.shape} {e.offset}" for e in self.entries]
        return xxhash.xxh3_64_intdigest("\n".join(manifest).encode()) >> 1

    @property
    def element_bytes(self) -> int:
        """Bytes of the elements in which two versions are best compared: those of the smallest dtype, at least 2."""
        return max(2, min((entry.dtype.itemsize for entry in self.entries), default=2))

    def digest(self, buffer: np.ndarray) -> str:
        """The digest of a whole buffer, uint8 [num_bytes]: 32 hex digits."""
        return digest(buffer)

    def views(self, buffer: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Each tensor as a view into the buffer (uint8 [num_bytes], on any device), tied weights under all their names."""
        flat = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
        assert flat.dtype == torch.uint8 and flat.shape == (self.num_bytes,), (flat.dtype, flat.shape)
        views = {e.name: flat[e.offset : e.offset + e.num_bytes].view(e.dtype).view(e.shape) for e in self.entries}
        return views | {alias: views[name] for alias, name in self.aliases.items()}

    def write(self, tensors: Mapping[str, Tensor], buffer: np.ndarray) -> None:
        """Cast and copy all tensors to their places in the buffer. Raises `KeyError` for a missing one."""
        for entry in self.entries:
            write_tensor(tensors[entry.name], buffer[entry.offset : entry.offset + entry.num_bytes], entry.dtype)
        if any(tensors[entry.name].is_cuda for entry in self.entries):
            torch.cuda.synchronize()

    def check(self, fingerprint: int, whom: str) -> None:
        """Raise `WrongDigest` unless `whom` means this layout."""
        if fingerprint != self.fingerprint:
            raise WrongDigest(
                f"{whom} serves weights of another layout: is `model.path` or `model.dtype` not the same?"
            )


@torch.no_grad()
def write_tensor(tensor: Tensor, buffer: np.ndarray, dtype: torch.dtype) -> None:
    """Cast and copy one tensor into its bytes; from a GPU the copy may still be under way afterwards."""
    if tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
        source = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        np.copyto(buffer, source)  # twice as fast as `copy_`
    else:
        torch.from_numpy(buffer).view(dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def host_buffer(num_bytes: int) -> np.ndarray:
    """Zeroed host memory, uint8 [num_bytes], with all pages in place and pinned where there is a GPU to copy from."""
    if torch.cuda.is_available():
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    buffer = np.empty(num_bytes, np.uint8)
    buffer.fill(0)
    return buffer


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a DTensor, else all of it."""
    # Asking for the type would load torch.distributed.tensor, a second of each process's start.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def _identity(tensor: Tensor) -> tuple[object, ...]:
    local = local_tensor(tensor)
    if local.device.type == "meta" or local.numel() == 0:
        return (id(tensor),)
    return (local.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
