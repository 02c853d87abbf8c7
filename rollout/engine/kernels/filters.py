"""Sampling with top-k, top-p, min-p and repetition penalties of each row as two Triton kernels, without a sort.

A filter keeps the scores from a threshold on, so that equal scores are kept together. The threshold is found by bisection over
the row's scores, with passes over those blocks alone whose peak reaches its lower bound (Park et al., "Qrita", 2026, cut
the candidates likewise). The token is then drawn as in `draw.py`, from the kept scores.
"""

# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw import BLOCK, DRAW_OPTIONS, SUMS_OPTIONS, best_token, block_sum, choose, row_sum, uniform

LEAST = tl.constexpr(-104.0)
"""Scores this far below the peak have no probability in fp32."""


@triton.jit
def _scores(logits, seen, scale, penalty, block, vocab, BLOCK: tl.constexpr):
    """A block of one row at its temperature: the policy's scores, and those after the repetition penalty."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf")) * scale
    y = x
    if penalty != 1.0:
        words = tl.load(seen + token // 32, mask=token < vocab, other=0)
        lowered = tl.where(x > 0, x / penalty, x * penalty)
        y = tl.where(((words >> (token % 32)) & 1) == 1, lowered, x)
    return x, y


@triton.jit
def _kept_sums(logits, seen, scale, penalty, peaks, base, threshold, blocks, num_blocks, vocab, BLOCK: tl.constexpr):
    """The exponentials of the scores from the threshold on, summed by block."""
    sums = tl.zeros(blocks.shape, tl.float32)
    for block in range(num_blocks):
        if tl.load(peaks + block) >= threshold:
            _, x = _scores(logits, seen, scale, penalty, block, vocab, BLOCK)
            kept = tl.sum(tl.where(x >= threshold, tl.exp(x - base), 0.0), 0)
            sums = tl.where(blocks == block, kept, sums)
    return sums


@triton.jit
def _least_kept(
    logits, seen, scale, penalty, peaks, base, low, high, limit, num_blocks, vocab,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least score from `low` on such that the larger ones are fewer than `limit`, or their exponentials sum up to less.

    high: the largest score. After a pass both ends are scores of the row, so it ends after few.
    """
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        larger, before, after = 0.0, float("-inf"), high
        for block in range(num_blocks):
            if tl.load(peaks + block) >= low:
                _, x = _scores(logits, seen, scale, penalty, block, vocab, BLOCK)
                is_larger = x > middle
                larger += tl.sum(tl.where(is_larger, tl.exp(x - base) if BY_MASS else 1.0, 0.0), 0)
                after = tl.minimum(after, tl.min(tl.where(is_larger, x, float("inf")), 0))
                before = tl.maximum(before, tl.max(tl.where(is_larger, float("-inf"), x), 0))
        is_kept = larger < limit
        low = tl.where(is_kept & (before >= low), low, after)
        high = tl.where(is_kept, tl.where(before >= low, before, after), high)
    return high


@triton.jit
def _threshold(
    logits, seen, scale, penalty, peaks, base, peak_of, weights, blocks, num_blocks, vocab, top_k, top_p, min_p,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The least score of one row that top-k, then top-p, then min-p keep; -inf if they are off."""
    low, high = tl.full((), float("-inf"), tl.float32), tl.max(peak_of, 0)
    if (top_k > 0) & (top_k < vocab):
        # The k largest peaks of blocks are k scores.
        nth_peak = tl.max(tl.where(blocks == top_k - 1, tl.sort(peak_of, descending=True), float("-inf")), 0)
        low = _least_kept(
            logits, seen, scale, penalty, peaks, base, tl.maximum(nth_peak, base + LEAST), high, top_k, num_blocks, vocab,
            BY_MASS=False, BLOCK=BLOCK,
        )  # fmt: skip
        if top_p < 1.0:
            weights = _kept_sums(logits, seen, scale, penalty, peaks, base, low, blocks, num_blocks, vocab, BLOCK=BLOCK)
    mass = tl.sum(weights, 0)
    # Of scores that are not finite the mass is NaN, and bisection would take a pass per score.
    if (top_p < 1.0) & (mass > 0):
        # All smaller scores together have less than the mass that may go.
        bound = base + tl.log((1.0 - top_p) * mass / vocab)
        low = _least_kept(
            logits, seen, scale, penalty, peaks, base, tl.maximum(low, bound), high, top_p * mass, num_blocks, vocab,
            BY_MASS=True, BLOCK=BLOCK,
        )  # fmt: skip
    if min_p > 0.0:
        low = tl.maximum(low, base + tl.log(min_p))
    return low


@triton.jit(do_not_specialize=["num_blocks"])
def _filtered_sums_kernel(
    logits, scales, penalties, seen, policy_peaks, policy_sums, peaks, sums, best, vocab, num_blocks, num_words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits, seen = logits + row * vocab, seen + row * num_words
    x, y = _scores(logits, seen, tl.load(scales + row), tl.load(penalties + row), block, vocab, BLOCK)
    place = row * num_blocks + block
    peak, total = block_sum(x)
    tl.store(policy_peaks + place, peak)
    tl.store(policy_sums + place, total)
    peak, total = block_sum(y)
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)
    tl.store(best + place, block * BLOCK + tl.argmax(y, 0))


@triton.jit(do_not_specialize=["num_blocks"])
def _filtered_draw_kernel(
    logits, scales, penalties, top_ks, top_ps, min_ps, seen, policy_peaks, policy_sums, peaks, sums, best, is_greedy, keys,
    positions, tokens, logprobs, vocab, num_blocks, num_words, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks, offsets = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    logits, seen, place = logits + row * vocab, seen + row * num_words, row * num_blocks
    peaks += place
    scale, penalty = tl.load(scales + row), tl.load(penalties + row)
    peak_of, base, weights = row_sum(peaks, sums + place, blocks, num_blocks)
    if tl.load(is_greedy + row):
        token = best_token(peak_of, best + place, num_blocks)
    else:
        threshold = _threshold(
            logits, seen, scale, penalty, peaks, base, peak_of, weights, blocks, num_blocks, vocab,
            tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row), BLOCK=BLOCK,
        )  # fmt: skip
        if threshold > float("-inf"):
            weights = _kept_sums(
                logits, seen, scale, penalty, peaks, base, threshold, blocks, num_blocks, vocab, BLOCK=BLOCK
            )
        aim = uniform(tl.load(keys + row), tl.load(positions + row)) * tl.sum(weights, 0)
        block, aim = choose(weights, blocks, aim)
        _, x = _scores(logits, seen, scale, penalty, block, vocab, BLOCK)
        offset, _ = choose(tl.where(x >= threshold, tl.exp(x - base), 0.0), offsets, aim)
        token = block * BLOCK + offset
    token = tl.minimum(token, vocab - 1)
    tl.store(tokens + row, token.to(tl.int64))
    word = seen + token // 32
    tl.store(word, tl.load(word) | (1 << (token % 32)))
    _, base, weights = row_sum(policy_peaks + place, policy_sums + place, blocks, num_blocks)
    tl.store(logprobs + row, tl.load(logits + token) * scale - base - tl.log(tl.sum(weights, 0)))


def draw_filtered(
    logits: Tensor,
    scales: Tensor,
    is_greedy: Tensor,
    keys: Tensor,
    positions: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    seen: Tensor,
) -> tuple[Tensor, Tensor]:
    """`draw.draw` of rows with filters and repetition penalties: the token is drawn after them, the log-probability is before.

    filters: those of `sampling.Filters`. seen: a bit for each token of a row's prompt and response, int32 [B, words]; the drawn
    tokens are added.
    """
    rows, vocab = logits.shape
    top_k, top_p, min_p, penalty = filters
    assert all(x.is_contiguous() for x in (logits, scales, is_greedy, seen, *filters))
    num_blocks = triton.cdiv(vocab, BLOCK)
    policy_peaks, policy_sums, peaks, sums = (torch.empty(rows, num_blocks, device=logits.device) for _ in range(4))
    best = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(rows, device=logits.device)
    _filtered_sums_kernel[(rows, num_blocks)](
        logits, scales, penalty, seen, policy_peaks, policy_sums, peaks, sums, best, vocab, num_blocks, seen.shape[1],
        BLOCK=BLOCK, **SUMS_OPTIONS,
    )  # fmt: skip
    _filtered_draw_kernel[(rows,)](
        logits, scales, penalty, top_k, top_p, min_p, seen, policy_peaks, policy_sums, peaks, sums, best, is_greedy, keys,
        positions, tokens, logprobs, vocab, num_blocks, seen.shape[1],
        BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, **DRAW_OPTIONS,
    )  # fmt: skip
    return tokens, logprobs
