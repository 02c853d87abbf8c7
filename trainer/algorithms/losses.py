"""Policy-gradient losses by token, before aggregation: `algorithm.loss`.

A loss is a function of `LossInputs`. It returns the loss of each token [R], which carries the gradient, and whether the clip
removed or changed the token's gradient [R] bool.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio, as in verl: its exponential is finite, and a token beyond it has no gradient."""


class LossInputs(NamedTuple):
    """Per token of n responses, one after the other: R tokens in all.

    logprobs [R] of the policy in training; old_logprobs [R] of the policy that the ratio is taken against; advantages,
    mask [R]; lengths [n] int64; clip_low, clip_high [R] or scalar: the trust region is 1 - clip_low to 1 + clip_high;
    clip_dual: bound of the ratio for negative advantages, None for none.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor
    clip_low: Tensor
    clip_high: Tensor
    clip_dual: float | None = None


LossFunction = Callable[[LossInputs], tuple[Tensor, Tensor]]


def clipped_surrogate(x: LossInputs) -> tuple[Tensor, Tensor]:
    """PPO's loss (arXiv 1707.06347, formula 7): -min(r A, clip(r) A) with r = p / p_old."""
    ratio = (x.logprobs - x.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _pessimistic(ratio, x)


def _pessimistic(ratio: Tensor, x: LossInputs) -> tuple[Tensor, Tensor]:
    free = ratio * x.advantages
    bounded = torch.clamp(ratio, 1 - x.clip_low, 1 + x.clip_high) * x.advantages
    return -torch.minimum(free, bounded), bounded < free


LOSSES: dict[str, LossFunction] = {"clip": clipped_surrogate}
