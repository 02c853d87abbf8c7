"""Corrections for tokens that another policy drew: an older version (staleness) or the generator's arithmetic (engine mismatch).

Three policies meet in the loss of a token (decoupled PPO: Hilton et al., arXiv 2110.00641, formula 5; AReaL, arXiv 2505.24298,
section 5.2): the behaviour policy b drew it, the update starts from the proximal policy q, and p is in training:

    weight * L(p / q)    with weight = q / b, truncated or masked, and L the loss with its clip around 1

`algorithm.proximal` chooses q, `algorithm.importance_sampling` bounds the weight. With one update for each version, q is p without its
gradient: the ratio in the clip is exactly 1, and staleness acts through the weight alone. So it is the weight that must keep stale
tokens from pushing on in a direction in which the updates since have gone far enough. Weights carry no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.recipe import AlgorithmSettings
from ..batch import PackedBatch
from .losses import log_ratio
from .sequences import sequence_sums, spread

MAX_SHIFT = 0.1
"""Largest change of a token's probability by which `token_dppo` still trains it (prime-rl's value)."""
PULL = 0.01
"""Weight of the squared log-ratio of `token_dppo`; docs/develop/log.md has the values that were tried."""


class Correction(NamedTuple):
    """The correction of each token, [R] each.

    proximal_logprobs: of the policy that the clip's ratio is taken against; weight: factor of the token's loss; is_limited: whether
    the weight is truncated or masked.
    """

    proximal_logprobs: Tensor
    weight: Tensor
    is_limited: Tensor


def correct(logprobs: Tensor, batch: PackedBatch, settings: AlgorithmSettings) -> Correction:
    """The correction of a micro-batch: logprobs [R] of the policy in training."""
    match settings.proximal:
        case "version":
            proximal = logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        case "rollout":
            proximal = batch.rollout_logprobs
    weight, is_limited = importance_weights(proximal, batch, settings)
    return Correction(proximal, weight, is_limited)


def importance_weights(logprobs: Tensor, batch: PackedBatch, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """Bounded weights w = q / b [R], and [R] bool where a bound acts: logprobs [R] of q.

    Truncated: min(w, cap), TIS (Ionides, 2008; IMPALA, arXiv 1802.01561, formula 1). `token_dppo`: the same, and 0 where q has
    `left_trust_region`. Masked: w within [1 / cap, cap], else 0 (IcePop, arXiv 2510.18855, formula 3; its bounds are .5 and 5). By
    `sequence` w is the product over the response's tokens with loss (verl's and TRL's modes of these names), of each branch apart.
    """
    cap = settings.importance_sampling_cap
    log_weights = log_ratio(logprobs, batch.rollout_logprobs)
    if settings.importance_sampling.startswith("sequence"):
        has_loss = batch.mask > 0
        sums = sequence_sums(torch.where(has_loss, log_weights, 0.0), batch.sequence_lengths)
        log_weights = spread(log_ratio(sums, torch.zeros_like(sums)), batch.sequence_lengths, len(logprobs))
    weight = log_weights.exp()
    is_above = weight > cap
    is_dropped = torch.zeros_like(is_above)
    if settings.importance_sampling.endswith("mask"):
        is_dropped = is_above | (weight < 1 / cap)
    elif settings.importance_sampling == "token_dppo":
        is_dropped = left_trust_region(logprobs, batch)
    return weight.clamp(max=cap).masked_fill(is_dropped, 0.0), is_above | is_dropped


def left_trust_region(logprobs: Tensor, batch: PackedBatch) -> Tensor:
    """[R] bool: whether a token's probability has moved further than `MAX_SHIFT` in the direction in which the advantage pushes.

    The mask of DPPO by binary total variation (arXiv 2602.04879). A ratio is a poor measure of how far a policy has moved: a rare
    token soon leaves any region of ratios, and a likely one hardly can.
    """
    shift = logprobs.exp() - batch.rollout_logprobs.exp()
    return torch.where(batch.advantages > 0, shift > MAX_SHIFT, (batch.advantages < 0) & (shift < -MAX_SHIFT))


def pull_to_generator(logprobs: Tensor, batch: PackedBatch, settings: AlgorithmSettings) -> Tensor | None:
    """PULL log(p / b)^2 of each token [R], a term of its loss with `token_dppo`, which carries a gradient; None without that term.

    prime-rl's loss has this term, with a smaller weight. It is 0 for a token without an advantage, so that a group of equal rewards
    has no gradient.
    """
    if settings.importance_sampling != "token_dppo" or settings.proximal != "version":
        return None
    squared = log_ratio(logprobs, batch.rollout_logprobs).square()
    return PULL * squared.masked_fill(batch.advantages == 0, 0.0)
