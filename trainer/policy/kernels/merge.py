"""Attention over keys that were cut into splits: the splits' results, merged in order."""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Keys of one split."""
NO_WINDOW = 1 << 30
"""A window that hides nothing."""


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lengths"])
def _merge_kernel(
    parts, lse, lengths, sinks, out, window, num_splits, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_ROWS: tl.constexpr,
    SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head that it sees, merged in order; a sink is a first split without a value."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    dims = tl.arange(0, DIM_ROWS)
    first = (row * HEADS + head).to(tl.int64) * num_splits
    peak = -1e30
    total = 0.0
    if HAS_SINKS:
        peak = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    mixed = tl.zeros((DIM_ROWS,), tl.float32)
    for split in range(tl.maximum(length - window, 0) // SPLIT, tl.minimum((length + SPLIT - 1) // SPLIT, num_splits)):
        part = tl.load(lse + first + split)
        new_peak = tl.maximum(peak, part)
        fade = tl.exp(peak - new_peak)
        weight = tl.exp(part - new_peak)
        value = tl.load(parts + (first + split) * DIM + dims, mask=dims < DIM, other=0.0)
        mixed = mixed * fade + value * weight
        total = total * fade + weight
        peak = new_peak
    place = out + (row * HEADS + head).to(tl.int64) * DIM + dims
    tl.store(place, (mixed / total).to(out.dtype.element_ty), mask=dims < DIM)


def merge_splits(
    parts: Tensor, lse: Tensor, lengths: Tensor, window: int, dtype: torch.dtype, sinks: Tensor | None = None
) -> Tensor:
    """[B, heads, d] of the splits' results parts [B, heads, splits, d] and their log-sum-exps lse [B, heads, splits], fp32.

    A query sees the last `window` of its first `lengths` int32 [B] keys, its own included; sinks [heads], see `AttentionSpec`.
    """
    rows, heads, num_splits, dim = parts.shape
    out = torch.empty(rows, heads, dim, dtype=dtype, device=parts.device)
    _merge_kernel[(rows, heads)](
        parts, lse, lengths, out if sinks is None else sinks, out, window, num_splits, HEADS=heads, DIM=dim,
        DIM_ROWS=max(16, triton.next_power_of_2(dim)), SPLIT=SPLIT, HAS_SINKS=sinks is not None, num_warps=1,
    )  # fmt: skip
    return out
