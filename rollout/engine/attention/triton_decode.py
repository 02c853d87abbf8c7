"""Paged decode attention as Triton kernels, for CUDA without another kernel library.

A row's keys are cut at fixed positions into splits of SPLIT tokens, one program each, and a second kernel merges the splits
in their order. So a row's bits do not depend on the other rows. The launch depends on the width of the page table alone, so
it fits a CUDA graph, and no kernel is compiled for a width. Any page size that is a multiple of BLOCK.
"""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....trainer.policy.kernels.merge import NO_WINDOW, SPLIT, merge_splits

BLOCK = 32
"""Keys of one iteration."""


@triton.jit(do_not_specialize=["num_splits"])
def _split_kernel(
    query, keys, values, table, lengths, out, lse, scale, softcap, window, table_stride, page_stride, head_stride, num_splits,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, DIM_ROWS: tl.constexpr, PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One split of one row's keys under the query heads of one KV head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    oldest = length - window
    start = split * SPLIT
    if (start < length) & (start + SPLIT > oldest):
        groups = tl.arange(0, GROUP_ROWS)
        dims = tl.arange(0, DIM_ROWS)
        offsets = tl.arange(0, BLOCK)
        heads = row * KV_HEADS * GROUP + head * GROUP + groups
        is_real = (groups[:, None] < GROUP) & (dims[None, :] < DIM)
        q = tl.load(query + heads[:, None] * DIM + dims[None, :], mask=is_real, other=0.0)
        peak = tl.full((GROUP_ROWS,), -1e30, tl.float32)
        total = tl.zeros((GROUP_ROWS,), tl.float32)
        mixed = tl.zeros((GROUP_ROWS, DIM_ROWS), tl.float32)
        # Blocks in which the query sees no key would change nothing.
        first_seen = tl.maximum(oldest - start, 0) // BLOCK * BLOCK
        for first in range(first_seen, tl.minimum(length - start, SPLIT), BLOCK):
            positions = start + first + offsets
            sees = (positions < length) & (positions >= oldest)
            page = tl.load(table + row * table_stride + positions // PAGE, mask=sees, other=0).to(tl.int64)
            place = page * page_stride + head * head_stride + (positions % PAGE) * DIM
            at = place[:, None] + dims[None, :]
            mask = sees[:, None] & (dims[None, :] < DIM)
            k = tl.load(keys + at, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            scores = tl.where(sees[None, :], scores, -1e30)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.where(sees[None, :], tl.exp(scores - new_peak[:, None]), 0.0)
            fade = tl.exp(peak - new_peak)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values + at, mask=mask, other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            peak = new_peak
        place = heads.to(tl.int64) * num_splits + split
        sum_or_one = tl.where(total > 0, total, 1.0)
        tl.store(out + place[:, None] * DIM + dims[None, :], mixed / sum_or_one[:, None], mask=is_real)
        tl.store(lse + place, tl.where(total > 0, peak + tl.log(sum_or_one), -1e30), mask=groups < GROUP)


def paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per row over its pages: query [B, heads, d] -> [B, heads, d].

    keys and values [pages, kv_heads, page_size, d], contiguous; table int32 [B, P] of page numbers; lengths int32 [B] of
    cached tokens, the query's own included; sinks [heads], see `AttentionSpec`. Source: flash decoding, here with splits at fixed positions.
    """
    query = query.contiguous()
    rows, heads, dim = query.shape
    _, kv_heads, page, _ = keys.shape
    assert keys.is_contiguous() and values.is_contiguous() and page % BLOCK == 0
    splits = -(-table.shape[1] * page // SPLIT)
    parts = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    group = heads // kv_heads
    dim_rows = triton.next_power_of_2(dim)
    window = NO_WINDOW if window is None else window
    _split_kernel[(rows, kv_heads, splits)](
        query, keys, values, table, lengths, parts, lse, scale, softcap or 1.0, window,
        table.stride(0), keys.stride(0), keys.stride(1), splits, GROUP=group,
        GROUP_ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, DIM_ROWS=max(16, dim_rows), PAGE=page,
        KV_HEADS=kv_heads, SPLIT=SPLIT, BLOCK=BLOCK, HAS_SOFTCAP=softcap is not None, num_warps=4,
    )  # fmt: skip
    return merge_splits(parts, lse, lengths, window, query.dtype, sinks)
