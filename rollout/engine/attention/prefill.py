"""Causal attention of prompt chunks: each chunk attends to its sequence's cached tokens and to itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....trainer.policy.attention import AttentionSpec, ChunkAttention, PackedAttention
from ....trainer.policy.exact.operators import ExactOperators, Run
from ..to_device import to_device

if TYPE_CHECKING:
    from ..kv_cache import KVCache


class PrefillAttention:
    """Packed chunks of several sequences; those that start at token 0 come first. Also fills the cache."""

    def __init__(self, cache: "KVCache", runs: Sequence[Run], device: torch.device) -> None:
        self.cache = cache
        self.cache_rows = _cache_rows(cache, [(run, run.start) for run in runs], device)
        fresh, continued = ([run for run in runs if (run.start == 0) == is_fresh] for is_fresh in (True, False))
        assert all(run.start == 0 for run in runs[: len(fresh)]), "fresh sequences come first"
        self._fresh = PackedAttention([run.stop for run in fresh], device) if fresh else None
        self._num_fresh = sum(run.stop for run in fresh)
        self._continued = None
        if continued:
            lengths = [run.stop - run.start for run in continued]
            key_lengths = [run.stop for run in continued]
            self._continued = ChunkAttention(lengths, key_lengths, device)
            self._continued_rows = _cache_rows(cache, [(run, 0) for run in continued], device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        self.cache.write(layer, self.cache_rows, key, value)
        parts = []
        count = self._num_fresh
        if self._fresh is not None:
            parts.append(self._fresh(layer, query[:count], key[:count], value[:count], rule))
        if self._continued is not None:
            keys, values = self.cache.read(layer, self._continued_rows)
            parts.append(self._continued(query[count:], keys, values, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ExactPrefillAttention:
    """`PrefillAttention` in exact mode."""

    def __init__(self, operators: ExactOperators, cache: "KVCache", runs: Sequence[Run], device: torch.device) -> None:
        self.cache = cache
        self.cache_rows = _cache_rows(cache, [(run, run.start) for run in runs], device)
        self._over_pages = operators.over_pages(runs, device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        self.cache.write(layer, self.cache_rows, key, value)
        return self._over_pages(query, self.cache.keys[layer], self.cache.values[layer], rule)


def _cache_rows(cache: "KVCache", parts: Sequence[tuple[Run, int]], device: torch.device) -> Tensor:
    """Rows of the cache for the tokens of each run, from a first token on."""
    slots = []
    for run, first in parts:
        positions = np.arange(first, run.stop)
        pages = np.array(run.pages, dtype=np.int64)[positions // cache.page_size]
        slots.append(pages * cache.page_size + positions % cache.page_size)
    return cache.cache_rows(to_device(np.concatenate(slots), device))
