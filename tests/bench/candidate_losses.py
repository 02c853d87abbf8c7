"""Losses that were tried as the default, as functions of a user's (`algorithm.loss=FILE.py:FUNCTION`, with `algorithm.proximal=rollout`).

The ratio r of a token is p / b, of the policy in training to the one that generated the token.
"""

import torch
from torch import Tensor

from headrace.trainer.algorithms.losses import LossInputs, log_ratio

DPPO_BOUND = 0.1
"""Largest difference of a token's probability, in the direction of its advantage (prime-rl's value)."""
DPPO_KL = 1e-3
"""Weight of the squared log-ratio (prime-rl's value)."""
CAP = 2.0


def dppo(x: LossInputs, bound: float = DPPO_BOUND) -> tuple[Tensor, Tensor]:
    """DPPO with binary total variation (arXiv 2602.04879), and prime-rl's squared log-ratio: -m r A + DPPO_KL log(r)^2.

    m is 0 where the token's probability has moved by more than the bound in the direction of its advantage.
    """
    log_r = log_ratio(x.logprobs, x.behaviour_logprobs)
    left = _left_by_probability(x, bound)
    return torch.where(left, 0.0, -log_r.exp() * x.advantages) + DPPO_KL * log_r.square(), left


def truncate_masked(x: LossInputs) -> tuple[Tensor, Tensor]:
    """Truncated importance weights, without gradient, inside DPPO's region: -m min(r, cap) A log p."""
    ratio = log_ratio(x.logprobs.detach(), x.behaviour_logprobs).exp()
    left = _left_by_probability(x)
    weight = ratio.clamp(max=CAP).masked_fill(left, 0.0)
    return -weight * x.advantages * x.logprobs, left


def truncate_masked_kl(x: LossInputs, weight: float = DPPO_KL) -> tuple[Tensor, Tensor]:
    """`truncate_masked` with the squared log-ratio of `dppo`."""
    loss, left = truncate_masked(x)
    return loss + weight * log_ratio(x.logprobs, x.behaviour_logprobs).square(), left


def truncate_masked_more_kl(x: LossInputs) -> tuple[Tensor, Tensor]:
    """The same with ten times the weight of the squared log-ratio."""
    return truncate_masked_kl(x, 10 * DPPO_KL)


def truncate_masked_pull(x: LossInputs) -> tuple[Tensor, Tensor]:
    """The same without the squared log-ratio of tokens whose advantage is 0, so that groups of equal rewards have no gradient."""
    loss, left = truncate_masked(x)
    squared = log_ratio(x.logprobs, x.behaviour_logprobs).square()
    return loss + torch.where(x.advantages == 0, 0.0, 10 * DPPO_KL * squared), left


def dppo_wide(x: LossInputs) -> tuple[Tensor, Tensor]:
    """`dppo` with prime-rl's earlier bound."""
    return dppo(x, 2 * DPPO_BOUND)


def _left_by_probability(x: LossInputs, bound: float = DPPO_BOUND) -> Tensor:
    """[R] bool: whether p - b has left the bound in the direction of the advantage."""
    moved = x.logprobs.detach().exp() - x.behaviour_logprobs.exp()
    return torch.where(x.advantages > 0, moved > bound, moved < -bound)
