"""Paged decode attention on CPU: in place on the page pool, and the reference that gathers."""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....trainer.policy.attention import AttentionSpec, masked_attention
from ....trainer.policy.exact.pages import MASKED_SCORE, ROWS, attend_pages, merge_in_order

if TYPE_CHECKING:
    from ..batch import DecodeBatch
    from ..kv_cache import KVCache

NO_POSITION = 1 << 40
"""Position of a key that no query may see."""
_LOG2_E = 1 / math.log(2)
_CALL_QUERIES = 32
"""Queries of a page that take about as long as one more call."""


class _SharedRun(NamedTuple):
    """Adjacent shared pages: the rows that own each, padded to equal numbers with row 0, and the positions of its keys."""

    pages: slice
    sharers: Tensor
    keys: Tensor


class PoolAttention:
    """Decode attention in place: every page in use is one row of a batched call, with the query of the page's owner.

    The partial results of a sequence's pages are merged by their log-sum-exp. Nothing is gathered, and the cost grows
    with the pages in use. Pages that several samples share come from the pool's upper end and are read once, with the
    queries of all their owners as rows, in one call for adjacent pages of about as many owners. `is_exact` follows the rules of `trainer.policy.exact.pages`.
    """

    name = "pool"

    def __init__(self, cache: "KVCache", is_exact: bool = False) -> None:
        self.cache = cache
        self.is_exact = is_exact
        self._generation = -1

    def prepare(self, batch: "DecodeBatch") -> None:
        self.cache_rows = self.cache.cache_rows(batch.slots())
        if self._generation != batch.generation:
            self._generation = batch.generation
            self._plan(batch)
        self._positions = torch.from_numpy(batch.positions)
        self._age = self._positions.index_select(0, self._owner)[:, None] - self._keys
        self._biases: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        self.cache.write(layer, self.cache_rows, key, value)
        keys = self.cache.keys[layer]
        values = self.cache.values[layer]
        heads = (key.shape[1], query.shape[1] // key.shape[1])
        q = query.index_select(0, self._owner).unflatten(1, heads)
        out, lse = self._attend(q, keys[: self._num_low], values[: self._num_low], self._low_bias(rule, query), rule)
        if self._shared:
            outs = [out]
            lses = [lse]
            for run in self._shared:
                q = query.index_select(0, run.sharers.flatten()).view(*run.sharers.shape, *heads, -1)
                q = q.transpose(1, 2).flatten(2, 3)
                bias = self._shared_bias(run, rule, query, heads[1])
                more, more_lse = self._attend(q, keys[run.pages], values[run.pages], bias, rule)
                # [pages, places * group, kv_heads, d] becomes one part per page and place.
                outs.append(more.reshape(-1, *out.shape[1:]))
                lses.append(more_lse.reshape(-1, *lse.shape[1:]))
            out = torch.cat(outs)
            lse = torch.cat(lses)
        if self.is_exact:
            merged = merge_in_order(out, lse, self._parts)
        else:
            merged = _merge(out, lse, self._parts, None if rule.sinks is None else rule.sinks.view(heads).t())
        return merged.transpose(1, 2).flatten(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rule: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Partial results [N, R, kv_heads, d] and their log-sum-exps [N, R, kv_heads] of q [N, kv_heads, R, d]."""
        rows = q.shape[2]
        if self.is_exact:
            q = F.pad(q, (0, 0, 0, -rows % ROWS))
            if bias is not None and bias.shape[2] > 1:
                bias = F.pad(bias, (0, 0, 0, -rows % ROWS))
        uses_products = q.dtype == torch.float32 and not self.is_exact
        out, lse = (attend_by_products if uses_products else attend_pages)(q, k, v, bias, rule.scale)
        return out.transpose(1, 2)[:, :rows], lse.transpose(1, 2)[:, :rows]

    def _low_bias(self, rule: AttentionSpec, like: Tensor) -> Tensor:
        if rule.window not in self._biases:
            sees = self._age >= 0 if rule.window is None else (self._age >= 0) & (self._age < rule.window)
            self._biases[rule.window] = torch.where(sees, 0.0, MASKED_SCORE).to(like.dtype)[:, None, None, :]
        return self._biases[rule.window]

    def _shared_bias(self, run: _SharedRun, rule: AttentionSpec, like: Tensor, group: int) -> Tensor | None:
        """[pages, 1, places * group, page_size]. Shared pages are full: only a window hides keys."""
        if rule.window is None:
            return like.new_zeros(1, 1, 1, self.cache.page_size) if self.is_exact else None
        age = self._positions[run.sharers][:, :, None] - run.keys[:, None, :]
        bias = torch.where(age < rule.window, 0.0, MASKED_SCORE).to(like.dtype)
        return bias.repeat_interleave(group, 1).unsqueeze(1)

    def _plan(self, batch: "DecodeBatch") -> None:
        columns = np.arange(int(batch.num_pages.max()))[None, :]
        is_shared = batch.is_shared[:, : columns.size]
        parts = np.zeros((len(batch), columns.size), dtype=np.int64)
        rows, cols = np.nonzero((columns < batch.num_pages[:, None]) & ~is_shared)
        pages = batch.table[rows, cols]
        self._num_low = int(pages.max()) + 1
        owner = np.zeros(self._num_low, dtype=np.int64)
        owner[pages] = rows
        parts[rows, cols] = pages
        starts = np.full(self._num_low, NO_POSITION, dtype=np.int64)
        starts[pages] = cols * self.cache.page_size
        self._keys = torch.from_numpy(starts[:, None] + np.arange(self.cache.page_size))
        self._owner = torch.from_numpy(owner)
        self._shared: list[_SharedRun] = []
        rows, cols = np.nonzero(is_shared)
        if rows.size:
            self._plan_shared(batch, parts, rows, cols)
        self._parts = torch.from_numpy(parts)

    def _plan_shared(self, batch: "DecodeBatch", parts: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> None:
        pages = batch.table[rows, cols]
        order = np.argsort(pages, kind="stable")
        rows = rows[order]
        cols = cols[order]
        pages = pages[order]
        place = np.arange(pages.size) - np.searchsorted(pages, pages)
        first = int(pages[0])
        num_parts = self._num_low
        for start, stop in _runs(np.bincount(pages - first)):
            run = slice(*np.searchsorted(pages, (first + start, first + stop)))
            if run.start == run.stop:
                continue  # holes
            spots = pages[run] - first - start
            num_places = int(place[run].max()) + 1
            sharers = np.zeros((stop - start, num_places), dtype=np.int64)
            sharers[spots, place[run]] = rows[run]
            parts[rows[run], cols[run]] = num_parts + spots * num_places + place[run]
            num_parts += sharers.size
            starts = np.zeros((stop - start, 1), dtype=np.int64)
            starts[spots, 0] = cols[run] * self.cache.page_size
            keys = torch.from_numpy(starts + np.arange(self.cache.page_size))
            self._shared.append(_SharedRun(slice(first + start, first + stop), torch.from_numpy(sharers), keys))


class GatherAttention:
    """The plain reference: gathers every row's keys, pads to the longest, one masked attention. Supports any `AttentionSpec`."""

    name = "gather"

    def __init__(self, cache: "KVCache") -> None:
        self.cache = cache

    def prepare(self, batch: "DecodeBatch") -> None:
        device = self.cache.keys[0].device
        size = self.cache.page_size
        self.cache_rows = self.cache.cache_rows(batch.slots())
        positions = torch.from_numpy(batch.positions).to(device)
        keys = torch.arange(int(batch.num_pages.max()) * size, device=device)
        table = torch.from_numpy(batch.table).to(device)
        self._every = self.cache.cache_rows((table[:, keys // size] * size + keys % size).flatten())
        self._age = positions[:, None] - keys[None, :]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        self.cache.write(layer, self.cache_rows, key, value)
        keys, values = (x.unflatten(0, (len(query), -1)) for x in self.cache.read(layer, self._every))
        sees = self._age >= 0 if rule.window is None else (self._age >= 0) & (self._age < rule.window)
        q = query[:, :, None]
        k = keys.transpose(1, 2)
        v = values.transpose(1, 2)
        return masked_attention(q, k, v, sees[:, None, None, :], rule)[:, :, 0]


def _runs(num_owners: np.ndarray, start: int = 0) -> list[tuple[int, int]]:
    """Cut pages with these numbers of owners into runs [start, stop), each padded to its largest number.

    Each cut is the one that spares most queries, as long as it spares more than a call costs.
    """
    count = len(num_owners)
    sizes = np.arange(1, count)
    before = np.maximum.accumulate(num_owners)[:-1] * sizes
    after = np.maximum.accumulate(num_owners[::-1])[:-1][::-1] * sizes[::-1]
    spared = count * int(num_owners.max()) - (before + after)
    if count == 1 or spared.max() <= _CALL_QUERIES:
        return [(start, start + count)]
    cut = int(spared.argmax()) + 1
    return _runs(num_owners[:cut], start) + _runs(num_owners[cut:], start + cut)


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_pages` in fp32 by two batched matrix products, which are faster than the fused kernel for few query rows.

    The softmax takes powers of 2, which a CPU computes faster than those of e.
    """
    query, key, value = (x.flatten(0, 1) for x in (q * (scale * _LOG2_E), k, v))
    scores = torch.bmm(query, key.transpose(1, 2)).unflatten(0, q.shape[:2])
    if bias is not None:
        scores.add_(bias)
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp2_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.flatten(0, 1), value).unflatten(0, q.shape[:2]).div_(total)
    return out, total.log2_().add_(peak).div_(_LOG2_E)[..., 0]


def _merge(out: Tensor, lse: Tensor, parts: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge the partial results `out` [N, ...rest, d], `lse` [N, ...rest] at the rows `parts` [B, P].

    sinks [...rest]: the log-sum-exp of one more part, whose `out` is 0.
    """
    count, width = parts.shape
    index = parts.flatten()
    lses = lse.index_select(0, index).view(count, width, *lse.shape[1:])
    if sinks is not None:
        lses = torch.cat((lses, sinks.to(lse.dtype).expand(count, 1, *sinks.shape)), 1)
    weights = lses.softmax(1)[:, :width]
    values = out.index_select(0, index).view(count, width, *out.shape[1:])
    return (values * weights[..., None]).sum(1).to(out.dtype)
