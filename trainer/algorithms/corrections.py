"""Corrections for tokens that another policy drew: an older version (staleness) or the generator's arithmetic (engine mismatch).

Three policies meet in the loss of a token (decoupled PPO: Hilton et al., arXiv 2110.00641, formula 5; AReaL, arXiv 2505.24298,
section 5.2): the behaviour policy b drew it, the update starts from the proximal policy q, and p is in training:

    weight * L(p / q)    with weight = q / b, truncated or masked, and L the loss with its clip around 1

`algorithm.proximal` chooses q, `algorithm.importance_sampling` bounds the weight. With one update for each version, q is p without its
gradient: the ratio in the clip is exactly 1, and staleness acts through the weight alone. So it is the weight that must keep stale
tokens from pushing on in a direction in which the updates since have gone far enough. Nothing here carries a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.recipe import AlgorithmSettings
from ..batch import PackedBatch
from .losses import log_ratio
from .sequences import sequence_sums, spread


class Correction(NamedTuple):
    """The correction of each token, [R] each.

    proximal_logprobs: of the policy that the clip's ratio is taken against; weight: factor of the token's loss; is_limited: whether
    the weight is truncated or masked.
    """

    proximal_logprobs: Tensor
    weight: Tensor
    is_limited: Tensor


def correct(
    logprobs: Tensor, batch: PackedBatch, settings: AlgorithmSettings, updates_per_version: int = 1
) -> Correction:
    """The correction of a micro-batch: logprobs [R] of the policy in training."""
    behaviour = batch.rollout_logprobs
    match settings.proximal:
        case "version":
            old = logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        case "rollout":
            old = behaviour
    weight, is_limited = importance_weights(log_ratio(old, behaviour), batch, settings, updates_per_version)
    return Correction(old, weight, is_limited)


def importance_weights(
    log_weights: Tensor, batch: PackedBatch, settings: AlgorithmSettings, updates_per_version: int
) -> tuple[Tensor, Tensor]:
    """Bounded weights [R], and [R] bool where a bound acts: log_weights [R] = log(q / b).

    Truncated: min(w, cap), TIS (Ionides, 2008; IMPALA, arXiv 1802.01561, formula 1). Clipped: the same, and for the loss `clip` 0 where
    the policy has `left_trust_region`; the other losses have no such region of a token. Masked: w within [1 / cap, cap], else 0 (IcePop,
    arXiv 2510.18855, formula 3; its bounds are .5 and 5). By `sequence` w is the product over the response's tokens with loss (verl's
    and TRL's modes of these names).
    """
    cap = settings.importance_sampling_cap
    if settings.importance_sampling.startswith("sequence"):
        has_loss = batch.mask > 0
        sums = sequence_sums(torch.where(has_loss, log_weights, 0.0), batch.response_lengths)
        log_weights = spread(log_ratio(sums, torch.zeros_like(sums)), batch.response_lengths)
    weight = log_weights.exp()
    is_above = weight > cap
    is_dropped = torch.zeros_like(is_above)
    if settings.importance_sampling.endswith("mask"):
        is_dropped = is_above | (weight < 1 / cap)
    elif settings.importance_sampling == "token_clip" and settings.loss == "clip":
        is_dropped = (batch.staleness > 0) & left_trust_region(weight, batch, settings, updates_per_version)
    return weight.clamp(max=cap).masked_fill(is_dropped, 0.0), is_above | is_dropped


def left_trust_region(
    ratios: Tensor, batch: PackedBatch, settings: AlgorithmSettings, updates_per_version: int
) -> Tensor:
    """[R] bool: whether the policy has moved further than the clip allows, in the direction in which the advantage pushes.

    PPO's clip (arXiv 1707.06347, formula 7) of the ratios [R] = q / b of tokens that are s versions of k updates old, with the trust
    regions of n = s k + 1 updates: (1 - clip_low)^n to (1 + clip_high)^n. The idea of a clip that adapts to staleness is that of
    arXiv 2607.18722.
    """
    num_updates = batch.staleness.to(ratios.dtype) * updates_per_version + 1
    lowest = max(1 - settings.clip_low, 0.0) ** num_updates
    highest = (1 + settings.clip_high) ** num_updates
    return torch.where(batch.advantages > 0, ratios > highest, (batch.advantages < 0) & (ratios < lowest))
