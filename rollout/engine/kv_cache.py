"""The tensors of the paged KV cache. `page_pool.py` says which pages are in use."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .to_device import to_device


class KVCache:
    """Keys and values of all layers, one tensor each per layer: [pages, kv_heads, page_size, head_dim]."""

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_kv_heads, self.page_size = shape[1:3]
        self._heads = torch.arange(self.num_kv_heads, device=device) * self.page_size
        self.keys = [lazy_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]
        self.values = [lazy_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]

    def cache_rows(self, slots: Tensor) -> Tensor:
        """Rows [T * kv_heads] of the heads' vectors for slots [T]. A slot is page * page_size + offset."""
        offsets = slots % self.page_size
        return (((slots - offsets) * self.num_kv_heads + offsets)[:, None] + self._heads).flatten()

    def write(self, layer: int, cache_rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, kv_heads, d] at rows [T * kv_heads]."""
        self.keys[layer].flatten(0, 2).index_copy_(0, cache_rows, key.flatten(0, 1))
        self.values[layer].flatten(0, 2).index_copy_(0, cache_rows, value.flatten(0, 1))

    def read(self, layer: int, cache_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv_heads, d] at rows [T * kv_heads]."""
        both = (self.keys[layer], self.values[layer])
        keys, values = (t.flatten(0, 2).index_select(0, cache_rows).unflatten(0, (-1, self.num_kv_heads)) for t in both)
        return keys, values

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy pages (source, target) as if one after the other."""
        copy_as_ordered(copies, (*self.keys, *self.values), self._heads.device)

    def export(self, pages: list[int], num_tokens: int) -> Tensor:
        """Keys and values of the first tokens in these pages: [layers, 2, tokens, kv_heads, head_dim], on the host."""
        rows = self.cache_rows(self._slots(pages, num_tokens))
        return torch.stack([torch.stack(self.read(layer, rows)) for layer in range(len(self.keys))]).cpu()

    def load(self, pages: list[int], exported: Tensor) -> None:
        """Write the result of `export` into these pages."""
        rows = self.cache_rows(self._slots(pages, exported.shape[2]))
        for layer, (keys, values) in enumerate(exported.to(rows.device)):
            self.write(layer, rows, keys, values)

    def _slots(self, pages: list[int], num_tokens: int) -> Tensor:
        positions = torch.arange(num_tokens, device=self._heads.device)
        table = torch.tensor(pages, device=positions.device)
        return table[positions // self.page_size] * self.page_size + positions % self.page_size

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def copy_as_ordered(copies: Iterable[tuple[int, int]], tensors: Sequence[Tensor], device: torch.device) -> None:
    """Copy rows (source, target) of each tensor as if one after the other; those that do not touch each other go together."""
    together: dict[int, int] = {}
    for source, target in copies:
        if not {source, target}.isdisjoint(together) or target in together.values():
            _copy_together(together, tensors, device)
            together = {}
        together[target] = source
    _copy_together(together, tensors, device)


def _copy_together(sources: dict[int, int], tensors: Sequence[Tensor], device: torch.device) -> None:
    if not sources:
        return
    places = to_device(np.array([*sources.values(), *sources], dtype=np.int64), device)
    source, target = places.split(len(sources))
    for tensor in tensors:
        tensor.index_copy_(0, target, tensor.index_select(0, source))


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU in memory that the kernel allocates at first touch, so that an unused part of the pool costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
