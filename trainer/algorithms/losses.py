"""Policy-gradient losses by token, before aggregation: `algorithm.loss`.

A loss is a function of `LossInputs`. It returns the loss of each token [R], which carries the gradient, and [R] bool: whether
the clip bounds the ratio of the token in the loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.plugins import load_object
from .sequences import sequence_means, spread

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio, as in verl: its exponential is finite, and a token beyond it has no gradient."""


class LossInputs(NamedTuple):
    """Per token of n responses, one after the other: R tokens in all. Each branch of a conversation with an agent is a response.

    logprobs [R] of the policy in training; proximal_logprobs [R] of the policy that the ratio is taken against; behaviour_logprobs
    [R] of the one that generated; advantages, mask [R]; lengths [n] int64; clip_low, clip_high: the trust region is 1 - clip_low to 1 + clip_high;
    clip_dual: bound of the ratio for negative advantages, None for none.
    """

    logprobs: Tensor
    proximal_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor
    clip_low: float
    clip_high: float
    behaviour_logprobs: Tensor
    clip_dual: float | None = None


LossFunction = Callable[[LossInputs], tuple[Tensor, Tensor]]


def clipped_surrogate(x: LossInputs) -> tuple[Tensor, Tensor]:
    """PPO's loss, which GRPO and DAPO share (arXiv 1707.06347, formula 7; bounds of their own: DAPO, arXiv 2503.14476, formula 10).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p / p_old; for A < 0 at most -clip_dual A (dual clip,
    arXiv 1912.09729; verl's `clip_ratio_c`, TRL's `delta`).
    """
    return _pessimistic(log_ratio(x.logprobs, x.proximal_logprobs).exp(), x)


def sequence_surrogate(x: LossInputs) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071, formulas 5 to 7), in its form by token (formulas 13 and 14).

    The ratio of a response is the geometric mean of its tokens': s = exp(mean of log(p / p_old)). The value of each token's
    ratio is s, its gradient is s times that of log p: with one advantage for the response, this is the gradient of s A.
    """
    mean = sequence_means(log_ratio(x.logprobs, x.proximal_logprobs).detach(), x.mask, x.lengths)
    return _pessimistic((spread(mean, x.lengths, len(x.mask)) + x.logprobs - x.logprobs.detach()).exp(), x)


def clipped_weight(x: LossInputs) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv 2506.13585, formulas 4 and 5): -w A log p, where w = clip(p / p_old) carries no gradient.

    Tokens beyond the clip keep their gradient. TRL's `epsilon_high` is 1 + clip_high, without a lower bound (clip_low=1).
    """
    ratio = log_ratio(x.logprobs, x.proximal_logprobs).exp().detach()
    weight = torch.clamp(ratio, 1 - x.clip_low, 1 + x.clip_high)
    return -weight * x.advantages * x.logprobs, weight != ratio


def reinforce(x: LossInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE (Williams, 1992): -A log p. It takes the tokens as drawn by the policy in training."""
    return -x.advantages * x.logprobs, torch.zeros_like(x.mask, dtype=torch.bool)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """log(p / p_other) of each token [R], within +-20: the gradient of an infinite ratio is NaN even where the clip removes it."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


LOSSES: dict[str, LossFunction] = {
    "clip": clipped_surrogate,
    "gspo": sequence_surrogate,
    "cispo": clipped_weight,
    "reinforce": reinforce,
}


def open_loss(name: str) -> LossFunction:
    """The loss that `algorithm.loss` names: one of `LOSSES`, or a user's function of `LossInputs`.

    The user's raises `SettingError` when it returns anything but two tensors [R].
    """
    return partial(_users_loss, load_object("algorithm.loss", name)) if ":" in name else LOSSES[name]


def _users_loss(function: Callable[[LossInputs], Any], x: LossInputs) -> tuple[Tensor, Tensor]:
    result = function(x)
    match result:
        case (Tensor(shape=x.logprobs.shape) as loss, Tensor(shape=x.logprobs.shape) as is_bounded):
            return loss, is_bounded
    raise SettingError(
        f"algorithm.loss: the function returns {_outline(result)}; it must return the loss of each token and whether"
        f" it is bounded, two tensors of {len(x.logprobs)} numbers for {len(x.logprobs)} tokens"
    )


def _outline(result: object) -> str:
    """The result of a user's function, in short."""
    if isinstance(result, Tensor):
        return f"a tensor of shape {[*result.shape]}"
    return f"({', '.join(map(_outline, result))})" if isinstance(result, tuple) else type(result).__name__


def _pessimistic(ratio: Tensor, x: LossInputs) -> tuple[Tensor, Tensor]:
    free = ratio * x.advantages
    bounded = torch.minimum(free, torch.clamp(ratio, 1 - x.clip_low, 1 + x.clip_high) * x.advantages)
    if x.clip_dual is not None:
        bounded = torch.where(x.advantages < 0, torch.maximum(bounded, x.clip_dual * x.advantages), bounded)
    return -bounded, bounded != free
