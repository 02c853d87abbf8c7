"""Corrections for tokens that another policy drew: an older version (staleness) or the generator's arithmetic (engine mismatch).

Three policies meet in the loss of a token (decoupled PPO: Hilton et al., arXiv 2110.00641, formula 5; AReaL, arXiv 2505.24298,
section 5.2): the behaviour policy b drew it, the update starts from the proximal policy q, and p is in training:

    weight * L(p / q)    with weight = q / b, truncated or masked, and L the loss with its clip around 1

`algorithm.proximal` chooses q, `algorithm.importance_sampling` bounds the weight. With one update for each version, q is p without its
gradient: the ratio in the clip is exactly 1, and staleness acts through the weight alone. Nothing here carries a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.recipe import AlgorithmSettings
from ..batch import PackedBatch
from .losses import log_ratio
from .sequences import sequence_sums, spread


class Correction(NamedTuple):
    """By token, [R] each.

    old_logprobs: of the policy that the clip's ratio is taken against; clip_low, clip_high: its bounds, 1 - clip_low to
    1 + clip_high; weight: factor of the token's loss; is_limited: whether the weight is truncated or masked.
    """

    old_logprobs: Tensor
    clip_low: Tensor
    clip_high: Tensor
    weight: Tensor
    is_limited: Tensor


def correct(logprobs: Tensor, batch: PackedBatch, settings: AlgorithmSettings) -> Correction:
    """The correction of a micro-batch: logprobs [R] of the policy in training."""
    logprobs, behaviour, staleness = logprobs.detach(), batch.rollout_logprobs, batch.staleness
    clip_low, clip_high = (torch.full_like(logprobs, clip) for clip in (settings.clip_low, settings.clip_high))
    match settings.proximal:
        case "version":
            old = logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        case "loglinear":
            old = interpolated(logprobs, behaviour, staleness, batch.progress)
        case "adaptive":
            old = behaviour
            clip_low, clip_high = widened(clip_low, clip_high, staleness)
        case "rollout":
            old = behaviour
    weight, is_limited = importance_weights(log_ratio(old, behaviour), batch, settings)
    return Correction(old, clip_low, clip_high, weight, is_limited)


def interpolated(logprobs: Tensor, behaviour: Tensor, staleness: Tensor, progress: float) -> Tensor:
    """Estimate of the proximal log-probs [R] without a forward pass: log b + s / (s + f) (log p - log b).

    The log-prob is taken as linear in the version (A-3PO, arXiv 2512.06547; AReaL's `loglinear`): b is `staleness` s versions
    behind q [R], and `progress` f, from 0 up to 1, is the share of the updates of this version that p has had. Exact for f = 0.
    """
    lag = staleness.to(logprobs.dtype)
    share = torch.where(lag > 0, lag / (lag + progress), torch.full_like(lag, float(progress == 0)))
    return torch.lerp(behaviour, logprobs, share)


def widened(clip_low: Tensor, clip_high: Tensor, staleness: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds [R] for a ratio that spans s + 1 updates, each with the trust region of one (`staleness` s [R]).

    1 - clip_low becomes (1 - clip_low)^(s + 1), and 1 + clip_high (1 + clip_high)^(s + 1).
    """
    num_updates = staleness.to(clip_low.dtype) + 1
    return 1 - (1 - clip_low) ** num_updates, (1 + clip_high) ** num_updates - 1


def importance_weights(log_weights: Tensor, batch: PackedBatch, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Bounded weights [R], and [R] bool where a bound acts: log_weights [R] = log(q / b).

    Truncated: min(w, cap), TIS (Ionides, 2008; IMPALA, arXiv 1802.01561, formula 1). Masked: w within [1 / cap, cap], else 0
    (IcePop, arXiv 2510.18855, formula 3; its bounds are .5 and 5). By `sequence` w is the product over the response's tokens with loss (verl's and
    TRL's modes of these names). Tokens of the version in training have the bounds of engine mismatch, the others those of
    staleness; a response is stale if any token of it is.
    """
    is_stale = batch.staleness > 0
    if settings.importance_sampling.startswith("sequence"):
        has_loss = batch.mask > 0
        sums = sequence_sums(torch.where(has_loss, log_weights, 0.0), batch.response_lengths)
        log_weights = spread(log_ratio(sums, torch.zeros_like(sums)), batch.response_lengths)
        stale_tokens = sequence_sums((is_stale & has_loss).to(sums.dtype), batch.response_lengths)
        is_stale = spread(stale_tokens > 0, batch.response_lengths)
    weight = log_weights.exp()
    cap = torch.full_like(weight, settings.mismatch_cap).masked_fill(is_stale, settings.importance_sampling_cap)
    if settings.importance_sampling.endswith("mask"):
        is_outside = (weight > cap) | (weight < 1 / cap)
        return weight.masked_fill(is_outside, 0.0), is_outside
    return torch.minimum(weight, cap), weight > cap
