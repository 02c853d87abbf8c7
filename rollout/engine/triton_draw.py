"""Plain sampling of `sampling.sample` as two Triton kernels: the logits are read once, where operators read or write them ten times.

The vocabulary is cut into blocks of fixed size. The first kernel gives each block's peak, its sum of exponentials and its best
token; the second chooses a block by the running sum over blocks, then a token within the block. So a row's bits do not
depend on the other rows.
"""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .streams import FACTORS

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(factor) for factor in FACTORS)
BLOCK = 4096
"""Tokens of one program."""
SUMS_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Options of the first launch. In both launches a product is rounded before a sum, or the two would see different scores."""
DRAW_OPTIONS = SUMS_OPTIONS | {"num_warps": 16}
"""Options of the second launch."""


@triton.jit
def _block_sum(x):
    """The largest score of a block, and the sum of the exponentials of the scores less it."""
    peak = tl.max(x, 0)
    # Of a block without probability the peak is -inf, which must not be subtracted from itself.
    return peak, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0)


@triton.jit
def _row_sum(peaks, sums, blocks, num_blocks):
    """The peaks of a row's blocks, the number that exponentials of the row are relative to, and the blocks' sums of them."""
    peak_of = tl.load(peaks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    peak = tl.max(peak_of, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak_of, base, tl.load(sums + blocks, mask=blocks < num_blocks, other=0.0) * tl.exp(peak_of - base)


@triton.jit
def _best_token(peak_of, best, num_blocks):
    """The most likely token of a row."""
    # The place of the largest of numbers that are not finite may be one that does not exist.
    return tl.load(best + tl.minimum(tl.argmax(peak_of, 0), num_blocks - 1))


@triton.jit
def _choose(weights, places, aim):
    """The first place with weight whose running sum is above the aim, and the aim less the sum before the place."""
    running = tl.cumsum(weights, 0)
    # By rounding the last sum may be below the aim: then the last place with weight counts.
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    place = tl.min(tl.where((running > aim) & (weights > 0), places, last), 0)
    return place, aim - tl.sum(tl.where(places == place, running - weights, 0.0), 0)


@triton.jit
def _uniform(key, position):
    """`streams.uniforms` of one row."""
    x = key + (position + 1) * GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX_2
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return (((x >> 41) & ((1 << 23) - 1)).to(tl.float32) + 0.5) * (1.0 / (1 << 23))


@triton.jit(do_not_specialize=["num_blocks"])
def _sums_kernel(logits, scales, peaks, sums, best, vocab, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")) * tl.load(scales + row)
    peak, total = _block_sum(x)
    place = row * num_blocks + block
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)
    tl.store(best + place, block * BLOCK + tl.argmax(x, 0))


@triton.jit(do_not_specialize=["num_blocks"])
def _draw_kernel(
    logits, scales, peaks, sums, best, is_greedy, keys, positions, tokens, logprobs, vocab, num_blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    offsets = tl.arange(0, BLOCK)
    logits += row * vocab
    place = row * num_blocks
    peak_of, base, weights = _row_sum(peaks + place, sums + place, blocks, num_blocks)
    total = tl.sum(weights, 0)
    scale = tl.load(scales + row)
    if tl.load(is_greedy + row):
        token = _best_token(peak_of, best + place, num_blocks)
    else:
        block, aim = _choose(weights, blocks, _uniform(tl.load(keys + row), tl.load(positions + row)) * total)
        inside = block * BLOCK + offsets
        x = tl.load(logits + inside, mask=inside < vocab, other=float("-inf")) * scale
        offset, _ = _choose(tl.exp(x - base), offsets, aim)
        token = block * BLOCK + offset
    token = tl.minimum(token, vocab - 1)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + token) * scale - base - tl.log(total))


def draw(logits: Tensor, scales: Tensor, is_greedy: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities fp32 [B] under the softmax of logits * scales, fp32 [B, vocab].

    scales [B, 1]; entry `positions` [B] of the streams `keys` [B] selects a token, except in greedy rows, bool [B]. A row whose logits are not finite gets the log-probability NaN.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous() and scales.is_contiguous() and is_greedy.is_contiguous()
    num_blocks = triton.cdiv(vocab, BLOCK)
    peaks, sums = (torch.empty(rows, num_blocks, device=logits.device) for _ in range(2))
    best = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(rows, device=logits.device)
    _sums_kernel[(rows, num_blocks)](logits, scales, peaks, sums, best, vocab, num_blocks, BLOCK=BLOCK, **SUMS_OPTIONS)
    _draw_kernel[(rows,)](
        logits, scales, peaks, sums, best, is_greedy, keys, positions, tokens, logprobs, vocab, num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, **DRAW_OPTIONS,
    )  # fmt: skip
    return tokens, logprobs
