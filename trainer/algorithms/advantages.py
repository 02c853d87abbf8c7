"""Advantages of whole responses, from the rewards of groups: `algorithm.advantage`.

An estimator is a function of `rewards` [n] and `group_sizes`, the numbers of samples in the groups that the rewards are from,
one group after the other. It returns the advantages [n].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.plugins import load_object
from ...comm.recipe import AlgorithmSettings

Function = Callable[[Tensor, Sequence[int]], Tensor]
STD_EPS = 1e-4
"""Added to a standard deviation, as in TRL (verl: 1e-6)."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator of advantages, and the data that it needs."""

    advantages: Function
    needs_whole_step: bool = False
    """Whether it needs all groups of a step at once; otherwise the trainer calls it for groups as they arrive."""
    whitens: bool = False
    """Whether the advantages of the step's tokens are then whitened."""
    has_critic: bool = False
    """Whether the trainer trains a critic, whose values and GAE turn the rewards into advantages."""
    is_relative: bool = False
    """Whether the advantages of a group are 0 if its rewards are equal."""
    kl_to_go: bool = False
    """Whether a KL penalty in the reward counts for the tokens up to its own; otherwise for the whole response."""


def group_relative(rewards: Tensor, group_sizes: Sequence[int], scale: str = "none") -> Tensor:
    """GRPO's advantage (DeepSeekMath, arXiv 2402.03300, section 4.1.2): (r - mean(r)) / std(r) within the group.

    `scale`: the standard deviation of the `group`, of the `batch` (all rewards), or `none` (Dr. GRPO, arXiv 2503.20783). It is
    the unbiased one plus 1e-4, as in TRL; the paper does not say which.
    """
    centred = torch.cat([_centred(group) for group in rewards.split(list(group_sizes))])
    if scale == "none":
        return centred
    parts = [len(rewards)] if scale == "batch" else list(group_sizes)
    stds = [part.std() if len(part) > 1 else part.new_zeros(()) for part in rewards.split(parts)]
    return centred / (torch.stack(stds).repeat_interleave(torch.tensor(parts)) + STD_EPS)


def leave_one_out(rewards: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """RLOO (arXiv 2402.14740): r minus the mean of the group's other rewards; 0 for a group of one."""
    return torch.cat([_centred(g) * (len(g) / max(len(g) - 1, 1)) for g in rewards.split(list(group_sizes))])


def whole_reward(rewards: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """The reward itself, without a baseline of the group: REINFORCE++ (arXiv 2501.03262) before it is whitened."""
    del group_sizes
    return rewards


def open_estimator(settings: AlgorithmSettings) -> Estimator:
    """The estimator that `algorithm.advantage` names.

    A user's function gets the whole step, unless it has an attribute `needs_whole_step` that is false.
    """
    if ":" in settings.advantage:
        function = load_object("algorithm.advantage", settings.advantage)
        return Estimator(
            partial(_users_advantages, function), needs_whole_step=getattr(function, "needs_whole_step", True)
        )
    return {
        "grpo": Estimator(
            partial(group_relative, scale=settings.scale_rewards),
            needs_whole_step=settings.scale_rewards == "batch",
            is_relative=True,
        ),
        "rloo": Estimator(leave_one_out, is_relative=True),
        "reinforce_plus_plus": Estimator(whole_reward, needs_whole_step=True, whitens=True, kl_to_go=True),
        "gae": Estimator(whole_reward, needs_whole_step=True, whitens=True, has_critic=True, kl_to_go=True),
        "reinforce_plus_plus_baseline": Estimator(group_relative, needs_whole_step=True, whitens=True),
    }[settings.advantage]


def _users_advantages(function: Function, rewards: Tensor, group_sizes: Sequence[int]) -> Tensor:
    advantages = torch.as_tensor(function(rewards, group_sizes), dtype=rewards.dtype)
    if advantages.shape != rewards.shape:
        raise SettingError(
            f"algorithm.advantage: the function returns a tensor of shape {[*advantages.shape]} for {len(rewards)} rewards"
        )
    return advantages


def _centred(rewards: Tensor) -> Tensor:
    """r - mean(r). Equal rewards give exact zeros: Adam would scale rounding errors of their mean up to a full step."""
    return torch.zeros_like(rewards) if rewards.max() == rewards.min() else rewards - rewards.mean()
