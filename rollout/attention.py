"""Paged attention on CPU: chunks of prompts, and decoding straight on the page pool."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..trainer.attention import PackedAttention, Rule, band, causal_attention, masked_attention
from .batch import DecodeBatch
from .kv_cache import KVCache

NEVER = -1e30
"""Added to a score that must not count; finite, so that a page without any valid token gives no NaN."""


class Stretch(NamedTuple):
    """Tokens [start, stop) of one sequence whose pages are `pages`."""

    pages: list[int]
    start: int
    stop: int


class PrefillAttention:
    """Attention of chunks of several sequences, packed: each sees its sequence's cached tokens and itself, causally."""

    def __init__(self, cache: KVCache, page_size: int, stretches: Sequence[Stretch], device: torch.device) -> None:
        self.cache = cache
        starts = np.cumsum([0, *(s.stop - s.start for s in stretches)])
        slots = np.concatenate([self._slots(s, s.start, s.stop, page_size) for s in stretches])
        self.lines = cache.lines(torch.from_numpy(slots).to(device))
        self.num_fresh = 0
        self._fresh: PackedAttention | None = None
        self._continued: list[tuple[slice, Tensor]] = []
        fresh = [s for s in stretches if s.start == 0]
        assert all(s.start == 0 for s in stretches[: len(fresh)]), "fresh sequences come first"
        if fresh:
            self._fresh = PackedAttention([s.stop for s in fresh], device)
            self.num_fresh = int(starts[len(fresh)])
        for index in range(len(fresh), len(stretches)):
            stretch = stretches[index]
            slots = torch.from_numpy(self._slots(stretch, 0, stretch.stop, page_size)).to(device)
            self._continued.append((slice(int(starts[index]), int(starts[index + 1])), cache.lines(slots)))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """See `trainer.attention.Attention`; also writes key and value into the cache."""
        self.cache.write(layer, self.lines, key, value)
        parts = []
        if self._fresh is not None:
            count = self.num_fresh
            parts.append(self._fresh(layer, query[:count], key[:count], value[:count], rule))
        for tokens, lines in self._continued:
            keys, values = self.cache.read(layer, lines)
            q, k, v = (x.transpose(0, 1)[None] for x in (query[tokens], keys, values))
            sees = band(q.shape[2], k.shape[2], rule.window, q.device)
            parts.append(masked_attention(q, k, v, sees, rule)[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _slots(stretch: Stretch, start: int, stop: int, page_size: int) -> np.ndarray:
        positions = np.arange(start, stop)
        return np.array(stretch.pages, dtype=np.int64)[positions // page_size] * page_size + positions % page_size


class PoolAttention:
    """Decode attention in place: every page in use is one row of a single SDPA call, queried by the page's owner.

    The partial results of a sequence's pages are merged by their log-sum-exp. Nothing is gathered, and the cost grows
    with the pages in use. Pages that several samples share lie at the pool's upper end and are read once, with the
    queries of all their owners as rows.
    """

    def __init__(self, cache: KVCache, page_size: int) -> None:
        self.cache = cache
        self.page_size = page_size
        self._generation = -1

    def prepare(self, batch: DecodeBatch) -> None:
        """Bring the plan up to the batch's positions."""
        self.lines = self.cache.lines(batch.slots)
        if self._generation != batch.generation:
            self._generation = batch.generation
            self._plan(batch)
        tails = batch.slots.numpy()
        self._mask.numpy()[tails // self.page_size, tails % self.page_size] = 0
        self._bias = self._mask.to(self.cache.keys[0].dtype)[:, None, None, :]

    def _plan(self, batch: DecodeBatch) -> None:
        columns = np.arange(int(batch.num_pages.max()))[None, :]
        is_shared = columns < batch.num_shared[:, None]
        parts = np.zeros((len(batch), columns.size), dtype=np.int64)
        rows, cols = np.nonzero((columns < batch.num_pages[:, None]) & ~is_shared)
        pages = batch.table[rows, cols]
        self._num_low = int(pages.max()) + 1
        owner = np.zeros(self._num_low, dtype=np.int64)
        owner[pages] = rows
        parts[rows, cols] = pages
        num_valid = np.zeros(self._num_low, dtype=np.int64)
        num_valid[pages] = batch.positions[rows] - cols * self.page_size
        is_valid = np.arange(self.page_size)[None, :] < num_valid[:, None]
        self._mask = torch.from_numpy(np.where(is_valid, 0, NEVER).astype(np.float32))
        self._owner = torch.from_numpy(owner)
        rows, cols = np.nonzero(is_shared)
        self._num_high = 0
        if rows.size:
            self._plan_shared(batch, parts, rows, cols)
        self._parts = torch.from_numpy(parts)

    def _plan_shared(self, batch: DecodeBatch, parts: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> None:
        pages = batch.table[rows, cols]
        first = int(pages.min())
        self._num_high = batch.pool.num_pages - first
        order = np.argsort(pages, kind="stable")
        rows, cols, pages = rows[order], cols[order], pages[order]
        place = np.arange(pages.size) - np.searchsorted(pages, pages)
        num_places = int(place.max()) + 1
        sharers = np.zeros((self._num_high, num_places), dtype=np.int64)
        sharers[pages - first, place] = rows
        parts[rows, cols] = self._num_low + (pages - first) * num_places + place
        self._sharers = torch.from_numpy(sharers)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """See `trainer.attention.Attention`; query [B, heads, d]. Also writes key and value into the cache."""
        self.cache.write(layer, self.lines, key, value)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_kv_heads, head_dim = key.shape[1:]
        num_grouped = query.shape[1] // num_kv_heads
        q = query.index_select(0, self._owner).unflatten(1, (num_kv_heads, num_grouped))
        out, lse = attend_pages(q, keys[: self._num_low], values[: self._num_low], self._bias, rule.scale)
        out, lse = out.transpose(1, 2).flatten(1, 2), lse.transpose(1, 2).flatten(1, 2)
        if self._num_high:
            num_places = self._sharers.shape[1]
            q = query.index_select(0, self._sharers.flatten()).view(
                self._num_high, num_places, num_kv_heads, num_grouped, head_dim
            )
            q = q.transpose(1, 2).flatten(2, 3)
            more, more_lse = attend_pages(q, keys[-self._num_high :], values[-self._num_high :], None, rule.scale)
            more = more.transpose(1, 2).reshape(-1, query.shape[1], head_dim)
            out = torch.cat((out, more))
            lse = torch.cat((lse, more_lse.transpose(1, 2).reshape(-1, query.shape[1])))
        merged = _merge(out, lse, self._parts)
        return merged.unflatten(1, (num_grouped, num_kv_heads)).transpose(1, 2).flatten(1, 2)


def attend_pages(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)


def _merge(out: Tensor, lse: Tensor, parts: Tensor) -> Tensor:
    """Attention [B, heads, d] from the partial results `out` [R, heads, d], `lse` [R, heads] that `parts` [B, P] names."""
    count, width = parts.shape
    index = parts.flatten()
    weights = lse.index_select(0, index).view(count, width, -1).softmax(1)
    values = out.index_select(0, index).view(count, width, *out.shape[1:])
    return (values * weights[..., None]).sum(1).to(out.dtype)


__all__ = ["PoolAttention", "PrefillAttention", "Stretch", "causal_attention"]
