"""Attention over pages whose rows do not depend on the other rows: of a prompt's chunk, of one new token, of whole sequences.

Keys are read in blocks of BLOCK from key 0 of a sequence on, in splits of fixed size, so a query takes the same operations
in the same order in every chunk of its sequence. A program's tile of queries has always the same shape: rows are tokens of one
sequence, each with the query heads of one KV head. Blocks that a row does not see change no bit of its result.
"""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import AttentionSpec
from .merge import NO_WINDOW, SPLIT, merge_splits
from .operand import operand


class QueryTiles(NamedTuple):
    """Tiles of adjacent queries, on the device of the queries.

    tiles int32 [n, 4]: first query, number of queries, position of the first, row of `table`. table int32 [S, P]: pages of
    each sequence. lengths int32 [T]: keys that each query sees without a window, its own included.
    """

    tiles: Tensor
    table: Tensor
    lengths: Tensor

    @classmethod
    def of_newest(cls, table: Tensor, lengths: Tensor) -> "QueryTiles":
        """The newest token of each sequence, by its table int32 [B, P] and its length int32 [B]."""
        rows = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return cls(torch.stack((rows, torch.ones_like(rows), lengths - 1, rows), 1), table, lengths)


def tile_rows(groups: int, dtype: torch.dtype) -> int:
    """Rows of a tile, with this number of query heads for each KV head; in half precision as many as tensor cores take at once."""
    return max(16 if dtype == torch.float32 else 64, triton.next_power_of_2(groups))


def tokens_per_tile(groups: int, dtype: torch.dtype) -> int:
    """Most tokens of a tile."""
    return tile_rows(groups, dtype) // groups


def block_and_warps(dim_rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Keys of one iteration, and warps of a program: all that fits into registers and the shared memory of an sm_86."""
    key_bytes = dim_rows * dtype.itemsize
    return 32 if key_bytes < 1024 else 16, 4 if key_bytes < 512 else 8


@triton.jit(
    do_not_specialize=["table_stride", "num_keys", "num_splits"], do_not_specialize_on_alignment=["tiles", "table"]
)
def _tile_kernel(
    query, keys, values, tiles, table, out, lse, scale, window, table_stride, num_keys, num_splits, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_ROWS: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of queries, under the query heads of one KV head, over one split of its sequence's keys."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    position = tl.load(tiles + tile * 4 + 2)
    sequence = tl.load(tiles + tile * 4 + 3)
    # A sequence that has ended may be beyond its table.
    end = tl.minimum(position + count, num_keys)
    oldest = tl.maximum(position - window + 1, 0)
    start = split * SPLIT
    if (start < end) & (start + SPLIT > oldest):
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM_ROWS)
        offsets = tl.arange(0, BLOCK)
        own = position + rows // GROUP
        place = ((first + rows // GROUP) * KV_HEADS + head).to(tl.int64) * GROUP + rows % GROUP
        is_row = rows < count * GROUP
        is_real = is_row[:, None] & (dims[None, :] < DIM)
        q = tl.load(query + place[:, None] * DIM + dims[None, :], mask=is_real, other=0.0)
        peak = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM_ROWS), tl.float32)
        for block in range(tl.maximum(start, oldest // BLOCK * BLOCK), tl.minimum(start + SPLIT, end), BLOCK):
            page = tl.load(table + sequence.to(tl.int64) * table_stride + block // PAGE).to(tl.int64)
            at = ((page * KV_HEADS + head) * PAGE + block % PAGE + offsets)[:, None] * DIM + dims[None, :]
            key = block + offsets
            # What is behind the newest key may be anything, and 0 times that NaN.
            is_stored = (key < end)[:, None] & (dims[None, :] < DIM)
            k = tl.load(keys + at, mask=is_stored, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            sees = (key[None, :] <= own[:, None]) & (key[None, :] > own[:, None] - window)
            scores = tl.where(sees, scores, -1e30)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.where(sees, tl.exp(scores - new_peak[:, None]), 0.0)
            fade = tl.exp(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values + at, mask=is_stored, other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            peak = new_peak
        place = place * num_splits + split
        sum_or_one = tl.where(total > 0, total, 1.0)
        tl.store(out + place[:, None] * DIM + dims[None, :], mixed / sum_or_one[:, None], mask=is_real)
        tl.store(lse + place, tl.where(total > 0, peak + tl.log(sum_or_one), -1e30), mask=is_row)


def exact_paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, queries: QueryTiles, num_keys: int, spec: AttentionSpec
) -> Tensor:
    """Causal attention of query [T, heads, d] over keys and values [pages, kv_heads, page_size, d] -> [T, heads, d].

    num_keys: as many as the longest sequence of these tiles has, or more, for which the table has pages. Without soft-capping and sinks.
    """
    assert spec.is_plain
    query = operand(query)
    _, heads, dim = query.shape
    _, kv_heads, page, _ = keys.shape
    num_splits = triton.cdiv(num_keys, SPLIT)
    groups = heads // kv_heads
    dim_rows = max(16, triton.next_power_of_2(dim))
    block, warps = block_and_warps(dim_rows, query.dtype)
    assert keys.is_contiguous() and values.is_contiguous() and page % block == 0 and SPLIT % page == 0
    window = NO_WINDOW if spec.window is None else spec.window
    parts = torch.empty(len(query), heads, num_splits, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(len(query), heads, num_splits, dtype=torch.float32, device=query.device)
    _tile_kernel[(len(queries.tiles), kv_heads, num_splits)](
        query, keys, values, queries.tiles, queries.table, parts, lse, spec.scale, window, queries.table.stride(0), num_keys,
        num_splits,
        KV_HEADS=kv_heads, GROUP=groups, ROWS=tile_rows(groups, query.dtype), DIM=dim,
        DIM_ROWS=dim_rows, PAGE=page, SPLIT=SPLIT, BLOCK=block, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return merge_splits(parts, lse, queries.lengths, window, query.dtype)
