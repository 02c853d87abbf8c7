"""Causal attention of narrow heads on a CPU: for head sizes of at most WIDTH it is about twice as fast as the stock kernel.

With few columns a product [rows, keys] x [keys, d] takes four times as long as its transpose [d, keys] x [keys, rows], and the
stock kernel has four such products. Here they are transposed. Query rows are taken in blocks, so that keys after a block are
skipped, and sequences in chunks, so that a block's scores stay in the cache. The backward pass computes the scores again:
FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2, without splits of the keys.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .length_classes import length_classes

WIDTH = 8
"""The largest head size for which these products are faster than the stock kernel."""
_ROWS = 32
"""Query positions in a block."""
_SCORES = 1 << 15
"""Scores of a head in a block of all sequences of a chunk: 1 MB for 8 heads."""


class _Chunk(NamedTuple):
    """Sequences of about equal length, padded to `num_blocks` blocks of `rows` positions."""

    tokens: Tensor
    """Index of each position's token; padding repeats the last token of its sequence."""
    targets: Tensor
    """`tokens`, but padding has the number of all tokens, one row after the last."""
    is_real: Tensor | None
    """[positions, 1, 1], or None if nothing is padded."""
    num_sequences: int
    num_blocks: int
    rows: int


class NarrowAttention:
    """Causal attention over whole sequences packed one after the other in one row. Differentiable."""

    def __init__(self, lengths: Sequence[int]) -> None:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.chunks: list[_Chunk] = []
        for members in length_classes(lengths):
            longest = lengths[members[0]]
            size = max(1, _SCORES // (min(_ROWS, longest) * longest))
            for first in range(0, len(members), size):
                self.chunks.append(_chunk(members[first : first + size], lengths, starts))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d]."""
        return _Narrow.apply(query, key, value, self.chunks, scale, window)  # pyright: ignore[reportReturnType]


def _chunk(members: Sequence[int], lengths: Sequence[int], starts: Tensor) -> _Chunk:
    longest = lengths[members[0]]
    num_blocks = -(-longest // _ROWS)
    rows = -(-longest // num_blocks)
    offsets, sizes = torch.arange(num_blocks * rows), torch.tensor([lengths[index] for index in members])
    tokens = (starts[[*members], None] + torch.minimum(offsets, sizes[:, None] - 1)).flatten()
    is_real = (offsets < sizes[:, None]).flatten()
    targets = torch.where(is_real, tokens, int(starts[-1]))
    padding = None if bool(is_real.all()) else is_real[:, None, None]
    return _Chunk(tokens, targets, padding, len(members), num_blocks, rows)


class _Tiles:
    """The positions of a chunk as matrices, one for each sequence and key head: [N, blocks * groups * rows, d]."""

    def __init__(
        self, chunk: _Chunk, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> None:
        self.chunk = chunk
        self.num_heads, self.num_kv_heads, self.head_dim = query.shape[1], key.shape[1], query.shape[2]
        self.groups = self.num_heads // self.num_kv_heads
        self.query, self.key, self.value = (self.of(x) for x in (query, key, value))
        self._scale, self._window = scale, window
        self._any = query.new_empty(1, 1, 1)  # an argument that beta=0 ignores

    def of(self, x: Tensor) -> Tensor:
        """[T, heads or kv_heads, d] as matrices. Query rows are ordered by block, head of the group, position."""
        c = self.chunk
        found = x.index_select(0, c.tokens)
        return self.matrices(found if c.is_real is None else found.mul_(c.is_real))

    def matrices(self, x: Tensor) -> Tensor:
        c = self.chunk
        groups = x.shape[1] // self.num_kv_heads
        x = x.view(c.num_sequences, c.num_blocks, c.rows, self.num_kv_heads, groups, self.head_dim)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(c.num_sequences * self.num_kv_heads, -1, self.head_dim)

    def rows(self, block: int) -> slice:
        """Query rows of a block."""
        size = self.chunk.rows * self.groups
        return slice(block * size, (block + 1) * size)

    def keys(self, block: int) -> slice:
        """Keys that a block's queries see."""
        rows = self.chunk.rows
        first = 0 if self._window is None else max(0, block * rows - self._window + 1)
        return slice(first, (block + 1) * rows)

    def weights(self, block: int) -> Tensor:
        """Softmax of a block's scores, [N, groups * rows, keys]."""
        keys, rows = self.keys(block), self.chunk.rows
        scores = self.product(self.query[:, self.rows(block)], self.key[:, keys].transpose(1, 2))
        masked = rows if self._window is None else scores.shape[2]  # the last keys; all queries see those before
        scores[:, :, scores.shape[2] - masked :].add_(_bias(rows, self.groups, masked, self._window))
        return torch.softmax(scores, -1, out=scores)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b times the scale of the scores."""
        return torch.baddbmm(self._any, a, b, beta=0, alpha=self._scale)

    def write_queries(self, blocks: list[Tensor], out: Tensor) -> None:
        """Transposed results of all blocks, [N, d, groups * rows] each, to the tokens of `out` [T + 1, heads, d]."""
        c = self.chunk
        found = torch.stack(blocks, 1).view(
            c.num_sequences, self.num_kv_heads, c.num_blocks, self.head_dim, self.groups, c.rows
        )
        found = found.permute(0, 2, 5, 1, 4, 3).reshape(-1, self.num_heads, self.head_dim)
        out.index_copy_(0, c.targets, found)

    def write_keys(self, found: Tensor, out: Tensor) -> None:
        """Transposed results [N, d, positions] to the tokens of `out` [T + 1, kv_heads, d]."""
        found = found.view(self.chunk.num_sequences, self.num_kv_heads, self.head_dim, -1).permute(0, 3, 1, 2)
        out.index_copy_(0, self.chunk.targets, found.reshape(-1, self.num_kv_heads, self.head_dim))


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: list[_Chunk], scale: float, window: int | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.rest = chunks, scale, window
        out = _row_more(query)
        for chunk in chunks:
            tiles = _Tiles(chunk, query, key, value, scale, window)
            blocks: list[Tensor] = []
            for block in range(chunk.num_blocks):
                values = tiles.value[:, tiles.keys(block)]
                blocks.append(torch.bmm(values.transpose(1, 2), tiles.weights(block).transpose(1, 2)))
            tiles.write_queries(blocks, out)
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        chunks, scale, window = ctx.rest
        d_query, d_key, d_value = (_row_more(x) for x in (query, key, value))
        for chunk in chunks:
            tiles = _Tiles(chunk, query, key, value, scale, window)
            grad, blocks = tiles.of(grads[0]), list[Tensor]()
            dk, dv = (
                torch.zeros_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
                for x in (tiles.key, tiles.value)
            )
            for block in range(chunk.num_blocks):
                rows, keys = tiles.rows(block), tiles.keys(block)
                weights, d_out = tiles.weights(block), grad[:, rows]
                dv[:, :, keys] += torch.bmm(d_out.transpose(1, 2), weights)
                d_weights = torch.bmm(d_out, tiles.value[:, keys].transpose(1, 2))
                d_scores = _softmax_backward(d_weights, weights)
                blocks.append(tiles.product(tiles.key[:, keys].transpose(1, 2), d_scores.transpose(1, 2)))
                dk[:, :, keys] += tiles.product(tiles.query[:, rows].transpose(1, 2), d_scores)
            tiles.write_queries(blocks, d_query)
            tiles.write_keys(dk, d_key)
            tiles.write_keys(dv, d_value)
        return d_query[:-1], d_key[:-1], d_value[:-1], None, None, None


@lru_cache(64)
def _bias(rows: int, groups: int, num_keys: int, window: int | None) -> Tensor:
    """Added to the scores of a block whose last query is at the last key: [groups * rows, keys]."""
    distance = torch.arange(num_keys - rows, num_keys)[:, None] - torch.arange(num_keys)
    is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(rows, num_keys).masked_fill_(is_hidden, float("-inf")).repeat(groups, 1)


def _softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the scores from that of the weights, which it overwrites."""
    operator: Any = torch.ops.aten._softmax_backward_data
    return operator(grad, weights, -1, weights.dtype, grad_input=grad)


def _row_more(x: Tensor) -> Tensor:
    """Uninitialised, like x with one row more, for padding."""
    return x.new_empty(len(x) + 1, *x.shape[1:])
