"""The losses of the Tinker API, by its documented formulas: sums over tokens, without a mean.

A loss reads the log-probs of the targets under the policy in training (`logprobs` below) and tensors of the same shape that the client
sends with the data. A token whose advantage or weight is 0 adds nothing, whatever its log-probs are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...comm.errors import SettingError

Inputs = Mapping[str, Tensor]
TARGETS = "target_tokens"
"""The token of each position that the policy has to predict there."""
CLIP_LOW = "clip_low_threshold"
CLIP_HIGH = "clip_high_threshold"
_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss: what it reads of each datum beside the targets, its settings with their defaults, and its formula.

    The formula takes log-probs [T], the inputs, [T] each, and the settings, and returns the loss of each token [T].
    """

    inputs: tuple[str, ...]
    formula: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]
    settings: Mapping[str, float] = field(default_factory=dict)


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """-weight * log p."""
    del settings
    weights = inputs["weights"]
    return -weights * torch.where(weights == 0, 0.0, logprobs)


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """-p / q * A, with the sampler's q."""
    del settings
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """-min(p / q * A, clip(p / q) * A): PPO (Schulman et al., arXiv 1707.06347, equation 7)."""
    ratio = _ratio(logprobs, inputs)
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """-clip(p / q) * log p * A, without a gradient of the clipped ratio: CISPO (arXiv 2506.13585, equation 4)."""
    advantages = inputs["advantages"]
    ratio = _clipped(_ratio(logprobs, inputs), settings).detach()
    return -ratio * torch.where(advantages == 0, 0.0, logprobs) * advantages


_POLICY_INPUTS = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": TokenLoss(("weights",), cross_entropy),
    "importance_sampling": TokenLoss(_POLICY_INPUTS, importance_sampling),
    "ppo": TokenLoss(_POLICY_INPUTS, ppo, _CLIP),
    "cispo": TokenLoss(_POLICY_INPUTS, cispo, _CLIP),
}


def open_loss(name: str, given: Mapping[str, float | str]) -> tuple[TokenLoss, dict[str, float]]:
    """The loss of a name, with its settings. Raises `SettingError` for another name, and for a setting that it does not have."""
    if name not in LOSSES:
        raise SettingError(f"loss_fn: {name!r} is not supported; this server has {', '.join(LOSSES)}")
    loss = LOSSES[name]
    settings = dict(loss.settings)
    for key, value in given.items():
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise SettingError(f"loss_fn_config.{key}: {name} has no such setting; it has {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise SettingError(f"loss_fn_config.{key}: must be a finite number, not {value!r}")
        settings[key] = value
    if settings and settings[CLIP_LOW] > settings[CLIP_HIGH]:
        raise SettingError(f"loss_fn_config.{CLIP_LOW}: {settings[CLIP_LOW]:g} is above {CLIP_HIGH}")
    return loss, settings


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """p / q, and 1 where it has no effect: there it may be infinite, and so may its gradient."""
    difference = torch.where(inputs["advantages"] == 0, 0.0, logprobs - inputs["logprobs"])
    return difference.exp()


def _clipped(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings[CLIP_LOW], settings[CLIP_HIGH])
