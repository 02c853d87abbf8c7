"""The places of the training state's tensors in a slot of memory, and the digest of what is there.

`state_copies.py` says what the slots are for.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...relay.weights.byte_ranges import join_digests
from ..checkpoint import mapped

_PIECE_BYTES = 2 << 20
"""A piece is copied, then its digest is made while it is in the cache. The C library streams pieces of 1 MiB and more."""
_ALIGNMENT = 64


class Leaf(NamedTuple):
    """A tensor of the state and its bytes in a slot."""

    tensor: Tensor
    start: int
    end: int

    def view(self, buffer: np.ndarray) -> Tensor:
        """Its place in a slot."""
        return torch.from_numpy(buffer[self.start : self.end]).view(self.tensor.dtype).reshape(self.tensor.shape)


class StateLayout:
    """The places of a state's tensors on this rank in a slot. A tensor with several names has one place."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.num_bytes = 0
        self.leaves: list[Leaf] = []
        """Each tensor once."""
        self._state = state
        self._named: dict[str, Leaf] = {}
        tensors: dict[str, Tensor] = {}
        mapped(state, lambda name, tensor: tensors.setdefault(name, tensor))
        starts: dict[tuple[int, int], int] = {}
        for name, tensor in sorted(tensors.items()):
            bytes_of_it = (tensor.data_ptr(), tensor.nbytes)
            is_new = bytes_of_it not in starts
            start = starts.setdefault(bytes_of_it, self.num_bytes)
            self._named[name] = Leaf(tensor, start, start + tensor.nbytes)
            if is_new:
                self.leaves.append(self._named[name])
                self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        lines = [
            f"{name} {leaf.tensor.dtype} {[*leaf.tensor.shape]} {leaf.start}" for name, leaf in self._named.items()
        ]
        self.fingerprint = xxhash.xxh3_64_intdigest("\n".join(lines).encode()) >> 12
        """52 bits over names, types, shapes and places: a float64 of a collective has them."""

    def state_in(self, buffer: np.ndarray, copies: dict[int, Tensor]) -> dict[str, Any]:
        """The state with the tensors of a slot. `copies` receives each by the address of the bytes of which it is a copy."""

        def view(name: str, tensor: Tensor) -> Tensor:
            copies[tensor.data_ptr()] = copy = self._named[name].view(buffer)
            return copy

        return mapped(self._state, view)

    def digest(self, buffer: np.ndarray) -> str:
        """The digest of a slot, 32 hex digits."""
        return join_digests(digest for leaf in self.leaves for digest in _digests(buffer[leaf.start : leaf.end]))

    def write(self, buffer: np.ndarray, check: Callable[[], None]) -> str:
        """Copy the tensors into a slot; returns its digest. `check` is called before each piece, and may raise an error.

        What comes from a GPU is there already.
        """

        def digests(leaf: Leaf) -> Iterator[bytes]:
            source = None if leaf.tensor.is_cuda else leaf.tensor.reshape(-1).view(torch.uint8).numpy()
            return _digests(buffer[leaf.start : leaf.end], source, check)

        return join_digests(digest for leaf in self.leaves for digest in digests(leaf))


def _digests(
    part: np.ndarray, source: np.ndarray | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """The digests of the pieces of a tensor's place, or of the source's, which are copied there."""
    for at in range(0, part.nbytes, _PIECE_BYTES):
        check()
        piece = (part if source is None else source)[at : at + _PIECE_BYTES]
        if source is not None:
            part[at : at + _PIECE_BYTES] = piece
        yield xxhash.xxh3_64_digest(piece.data)
