"""Causal attention of narrow heads on a CPU: for head sizes of at most WIDTH it is about twice as fast as the stock kernel.

With few columns a product [rows, keys] x [keys, d] takes four times as long as its transpose [d, keys] x [keys, rows], and the
stock kernel has four such products. Here they are transposed. Query rows are taken in blocks, so that keys after a block are
skipped, and sequences in chunks, so that a block's scores stay in the cache. The backward pass computes the scores again:
FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2, without splits of the keys. Powers are those of 2, which a CPU computes
in a third of the time of those of e, and what a block subtracts from all scores of a row is one more column of the products.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .length_classes import length_classes

WIDTH = 8
"""The largest head size for which these products are faster than the stock kernel."""
_ROWS = 32
"""Query positions in a block."""
_SCORES = 1 << 14
"""Scores of a head in a block of all sequences of a chunk, about: 512 KB for 8 heads."""
_LOG2_E = 1 / math.log(2)


class _Chunk(NamedTuple):
    """Sequences of about equal length, padded to whole blocks."""

    tokens: Tensor
    """Index of each position's token, [sequences, blocks, rows]; padding repeats the last token of its sequence."""
    targets: Tensor
    """`tokens`, but padding has the number of all tokens, one row after the last."""


class _Block(NamedTuple):
    """Queries of a chunk and the keys that they see."""

    queries: slice
    keys: slice
    bias: Tensor
    """Added to the scores of the last keys, [groups * rows, masked keys]; all queries see those before."""


class _Tiles:
    """The rows of a chunk's matrices, one for each sequence and key head: [N, blocks * groups * rows, d]."""

    def __init__(self, chunk: _Chunk, num_heads: int, num_kv_heads: int) -> None:
        self._shape = (len(chunk.tokens) * num_kv_heads, -1)
        self._orders = {
            heads: tuple(_order(tokens, heads, num_kv_heads) for tokens in chunk) for heads in (num_heads, num_kv_heads)
        }
        self._num_blocks, self._rows = chunk.tokens.shape[1:]
        self._groups = num_heads // num_kv_heads

    def of(self, x: Tensor) -> Tensor:
        """Matrices of x [T, heads or kv_heads, d]; padding has numbers of the last token of its sequence."""
        return x.flatten(0, 1).index_select(0, self._orders[x.shape[1]][0]).unflatten(0, self._shape)

    def padded(self, x: Tensor) -> Tensor:
        """Matrices of x [T + 1, heads or kv_heads, d]; padding has the last row's numbers."""
        return x.flatten(0, 1).index_select(0, self._orders[x.shape[1]][1]).unflatten(0, self._shape)

    def write(self, found: Tensor, out: Tensor) -> None:
        """Transposed matrices [N, d, rows] to the tokens of `out` [T + 1, heads or kv_heads, d]."""
        out.flatten(0, 1).index_copy_(0, self._orders[out.shape[1]][1], found.transpose(1, 2).flatten(0, 1))

    def blocks(self, window: int | None) -> Iterator[_Block]:
        rows, size = self._rows, self._rows * self._groups
        for block in range(self._num_blocks):
            first = 0 if window is None else max(0, block * rows - window + 1)
            keys = slice(first, (block + 1) * rows)
            num_masked = rows if window is None else keys.stop - first
            bias = _bias(rows, self._groups, num_masked, window)
            yield _Block(slice(block * size, (block + 1) * size), keys, bias)


class NarrowAttention:
    """Causal attention over whole sequences packed one after the other in one row. Differentiable."""

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._chunks: list[_Chunk] = []
        self._tiles: dict[tuple[int, int], list[_Tiles]] = {}
        for members in length_classes(lengths):
            longest = lengths[members[0]]
            size = -(-_SCORES // (min(_ROWS, longest) * longest))
            for first in range(0, len(members), size):
                self._chunks.append(_chunk(members[first : first + size], lengths, starts))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d]."""
        heads = query.shape[1], key.shape[1]
        if heads not in self._tiles:  # once: the layers of a policy have the same heads
            self._tiles[heads] = [_Tiles(chunk, *heads) for chunk in self._chunks]
        return _Narrow.apply(query, key, value, self._tiles[heads], scale, window)  # pyright: ignore[reportReturnType]


def _chunk(members: Sequence[int], lengths: Sequence[int], starts: Tensor) -> _Chunk:
    longest = lengths[members[0]]
    num_blocks = -(-longest // _ROWS)
    rows = -(-longest // num_blocks)
    offsets, sizes = torch.arange(num_blocks * rows), torch.tensor([lengths[index] for index in members])[:, None]
    tokens = starts[[*members], None] + torch.minimum(offsets, sizes - 1)
    targets = torch.where(offsets < sizes, tokens, int(starts[-1]))
    return _Chunk(*(x.unflatten(1, (num_blocks, rows)) for x in (tokens, targets)))


def _order(tokens: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Rows of [T * heads, d] by sequence, key head, block, head of the group, position."""
    heads = torch.arange(num_heads).view(1, num_kv_heads, 1, -1, 1)
    return (tokens[:, None, :, None] * num_heads + heads).flatten()


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: list[_Tiles], scale: float, window: int | None
    ) -> Tensor:
        out, norms = _row_more(query), _row_more(query[:, :, :1])
        scaled, value_and_one = query * (scale * _LOG2_E), F.pad(value, (0, 1), value=1.0)
        for chunk in chunks:
            q, k, v = (chunk.of(x) for x in (scaled, key, value_and_one))
            peaks, parts = list[Tensor](), list[Tensor]()
            for queries, keys, bias in chunk.blocks(window):
                scores = torch.bmm(q[:, queries], k[:, keys].transpose(1, 2))
                scores[:, :, -bias.shape[1] :].add_(bias)
                peaks.append(scores.amax(-1, keepdim=True))
                weights = scores.sub_(peaks[-1]).exp2_()
                parts.append(torch.bmm(v[:, keys].transpose(1, 2), weights.transpose(1, 2)))
            found, total = torch.cat(parts, 2).split((value.shape[2], 1), 1)
            chunk.write(found / total, out)
            chunk.write(total.log2() + torch.cat(peaks, 1).transpose(1, 2), norms)
        ctx.save_for_backward(scaled, key, value, out[:-1], norms[:-1])
        ctx.rest = chunks, scale, window
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of weights P with the gradient dP, the scores' gradient is dS = P (dP - D), where D = sum(out * d out)."""
        scaled, key, value, out, norms = ctx.saved_tensors
        chunks, scale, window = ctx.rest
        (grad,), width = grads, key.shape[2]
        d_query, d_key, d_value = (_row_more(x) for x in (scaled, key, value))
        scaled_and_norm, key_and_one = torch.cat((scaled, -norms), 2), F.pad(key, (0, 1), value=1.0)
        value_and_one = F.pad(value, (0, 1), value=1.0)
        grad_and_d = F.pad(torch.cat((grad, -(grad * out).sum(2, keepdim=True)), 2), (0, 0, 0, 0, 0, 1))
        for chunk in chunks:
            q, k, v = (chunk.of(x) for x in (scaled_and_norm, key_and_one, value_and_one))
            g, parts = chunk.padded(grad_and_d), list[Tensor]()
            dk, dv = (key.new_zeros(len(k), width, k.shape[1]) for _ in range(2))
            for queries, keys, bias in chunk.blocks(window):
                weights = torch.bmm(q[:, queries], k[:, keys].transpose(1, 2))
                weights[:, :, -bias.shape[1] :].add_(bias)
                weights.exp2_()
                dv[:, :, keys] += torch.bmm(g[:, queries, :width].transpose(1, 2), weights)
                d_scores = torch.bmm(g[:, queries], v[:, keys].transpose(1, 2)).mul_(weights)
                parts.append(torch.bmm(k[:, keys, :width].transpose(1, 2), d_scores.transpose(1, 2)))
                dk[:, :, keys] += torch.bmm(q[:, queries, :width].transpose(1, 2), d_scores)
            for found, d_x in ((torch.cat(parts, 2), d_query), (dk, d_key), (dv, d_value)):
                chunk.write(found, d_x)
        return d_query[:-1].mul_(scale), d_key[:-1].div_(_LOG2_E), d_value[:-1], None, None, None


@lru_cache(64)
def _bias(rows: int, groups: int, num_keys: int, window: int | None) -> Tensor:
    """Added to the scores of a block whose last query is at the last key: [groups * rows, keys]."""
    distance = torch.arange(num_keys - rows, num_keys)[:, None] - torch.arange(num_keys)
    is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(rows, num_keys).masked_fill_(is_hidden, float("-inf")).repeat(groups, 1)


def _row_more(x: Tensor) -> Tensor:
    """Uninitialised, like x with one row more, for padding."""
    return x.new_empty(len(x) + 1, *x.shape[1:])
