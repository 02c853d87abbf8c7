"""The paged KV cache: the owners of pages, and the tensors of keys and values.

Page 0 has no owner and is never valid. Private pages are taken from the low end, pages that several samples share from the
high end, so that each kind forms a range that attention reads in place.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


class PagePool:
    """Reference counts of pages; no tensors. Every taken page is counted once per owner."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 2, "page 0 is not usable"
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_owners = np.zeros(num_pages, dtype=np.int32)
        self._is_free = np.ones(num_pages, dtype=bool)
        self._is_free[0] = False
        self.num_free = num_pages - 1

    def take(self, is_shared: bool = False) -> int:
        """A free page with one owner: the lowest, or the highest for a page that will be shared."""
        page = self._first_free(is_shared)
        assert page is not None, "the scheduler takes only free pages"
        self._is_free[page] = False
        self.num_free -= 1
        self.num_owners[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            assert self.num_owners[page] > 0
            self.num_owners[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Remove an owner from each page; a page without an owner is free."""
        for page in pages:
            assert self.num_owners[page] > 0
            self.num_owners[page] -= 1
            if self.num_owners[page] == 0:
                self._is_free[page] = True
                self.num_free += 1

    def move(self, page: int, is_shared: bool = False) -> int:
        """Move a page and its owners towards its end of the pool; returns the new page, or the same if none is better."""
        target = self._first_free(is_shared)
        if target is None or (target < page) == is_shared:
            return page
        self._is_free[target], self._is_free[page] = False, True
        self.num_owners[target], self.num_owners[page] = self.num_owners[page], 0
        return target

    def _first_free(self, is_shared: bool) -> int | None:
        if self.num_free == 0:
            return None
        order = self._is_free[::-1] if is_shared else self._is_free
        first = int(order.argmax())
        return self.num_pages - 1 - first if is_shared else first

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def check(self, owners: Iterable[list[int]]) -> None:
        """Assert that every page has exactly the owners that claim it, and that all other pages are free."""
        claimed = np.zeros_like(self.num_owners)
        for pages in owners:
            for page in pages:
                claimed[page] += 1
        assert (claimed == self.num_owners).all(), "a page has other owners than it counts"
        expected = claimed == 0
        expected[0] = False
        assert (self._is_free == expected).all() and self.num_free == int(expected.sum()), "a page leaked"


class KVCache:
    """Keys and values of all layers, one tensor each per layer: [pages, kv_heads, page_size, head_dim]."""

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_kv_heads, self.page_size = shape[1:3]
        self._heads = torch.arange(self.num_kv_heads, device=device) * self.page_size
        self.keys = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]
        self.values = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]

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

    def copy_page(self, source: int, target: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU in memory that the kernel allocates at first touch, so that an unused part of the pool costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
