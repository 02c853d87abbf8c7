"""Causal attention of prompt chunks: each chunk attends to its sequence's cached tokens and to itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....trainer.policy.attention import AttentionSpec, PackedAttention, chunk_attention
from ....trainer.policy.exact_attention import Run, TileAttention
from ..to_device import to_device

if TYPE_CHECKING:
    from ..kv_cache import KVCache


class PrefillAttention:
    """Packed chunks of several sequences; those that start at token 0 come first. Also fills the cache."""

    def __init__(self, cache: "KVCache", runs: Sequence[Run], device: torch.device) -> None:
        self.cache = cache
        starts = np.cumsum([0, *(run.stop - run.start for run in runs)])
        self.cache_rows = _cache_rows(cache, [(run, run.start) for run in runs], device)
        fresh = [run for run in runs if run.start == 0]
        assert all(run.start == 0 for run in runs[: len(fresh)]), "fresh sequences come first"
        self._fresh = PackedAttention([run.stop for run in fresh], device) if fresh else None
        self._num_fresh = int(starts[len(fresh)])
        self._continued = [
            (slice(int(starts[index]), int(starts[index + 1])), _cache_rows(cache, [(runs[index], 0)], device))
            for index in range(len(fresh), len(runs))
        ]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        self.cache.write(layer, self.cache_rows, key, value)
        parts = []
        if self._fresh is not None:
            count = self._num_fresh
            parts.append(self._fresh(layer, query[:count], key[:count], value[:count], rule))
        for tokens, cache_rows in self._continued:
            keys, values = self.cache.read(layer, cache_rows)
            parts.append(chunk_attention(query[tokens], keys, values, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ExactPrefillAttention:
    """`PrefillAttention` in exact mode."""

    def __init__(self, cache: "KVCache", runs: Sequence[Run], device: torch.device) -> None:
        self.cache = cache
        self.cache_rows = _cache_rows(cache, [(run, run.start) for run in runs], device)
        self._tiles = TileAttention(runs, device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        self.cache.write(layer, self.cache_rows, key, value)
        return self._tiles(query, self.cache.keys[layer], self.cache.values[layer], rule)


def _cache_rows(cache: "KVCache", parts: Sequence[tuple[Run, int]], device: torch.device) -> Tensor:
    """Rows of the cache for the tokens of each run, from a first token on."""
    slots = []
    for run, first in parts:
        positions = np.arange(first, run.stop)
        pages = np.array(run.pages, dtype=np.int64)[positions // cache.page_size]
        slots.append(pages * cache.page_size + positions % cache.page_size)
    return cache.cache_rows(to_device(np.concatenate(slots), device))
