"""Sums over a row, by one program for each row: the RMS norm, and the logarithm of a softmax's denominator."""

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


@triton.jit
def _norm_kernel(x, weight, out, eps, size, SIZE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    number = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(number * number, 0) / size + eps)
    result = number * scale * tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=column < size)


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., n]; computed in fp32, rounded once."""
    x, size = operand(x), x.shape[-1]
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    warps = 1 if padded <= 256 else 4 if padded <= 4096 else 8
    _norm_kernel[(x.numel() // size,)](x, operand(weight), out, eps, size, SIZE=padded, num_warps=warps)
    return out


@triton.jit
def _normalizer_kernel(logits, normalizer, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, total = float("-inf"), 0.0
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
