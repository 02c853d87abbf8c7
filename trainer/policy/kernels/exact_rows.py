"""Sums over a row, by one program: the RMS norm, and the logarithm of a softmax's denominator."""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operand import operand

BLOCK = 4096
"""Logits of one iteration."""
TILE = 4096
"""Numbers that the norms of one program read, where a row has fewer."""


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(x, weight, out, eps, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * columns + column[None, :]
    is_real = (row < rows)[:, None] & (column < columns)[None, :]
    number = tl.load(x + at, mask=is_real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(number * number, 1) / columns + eps)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    result = number * scale[:, None] * factor[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_real)


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., n]; computed in fp32, rounded once."""
    x = operand(x)
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(columns)
    in_program = max(1, TILE // padded)
    _norm_kernel[(triton.cdiv(rows, in_program),)](
        x, operand(weight), out, eps, rows, columns, ROWS=in_program, COLUMNS=padded, num_warps=4 if padded <= TILE else 8,
    )  # fmt: skip
    return out


@triton.jit
def _normalizer_kernel(logits, normalizer, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, 0))
        # While no token has had a probability the peak is -inf, which must not be subtracted from itself.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(x - base), 0)
        peak = new_peak
    tl.store(normalizer + row, peak + tl.log(total))


def exact_log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities fp32 [T, vocab] of logits fp32 [T, vocab]; those of a row that is not finite are NaN."""
    logits = operand(logits)
    assert logits.dtype == torch.float32
    normalizer = logits.new_empty(len(logits))
    _normalizer_kernel[(len(logits),)](logits, normalizer, logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return logits - normalizer[:, None]
