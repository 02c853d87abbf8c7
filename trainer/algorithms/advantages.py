"""Advantages of whole responses from the rewards of their groups: `algorithm.advantage`."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, scale_by_std: bool, eps: float = 1e-4) -> Tensor:
    """GRPO's advantage of each sample of one group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    rewards [n] -> advantages [n]: r - mean(r), divided by the standard deviation of the group if `scale_by_std`. Equal rewards
    give exact zeros: rounding errors of their mean would give a gradient, and Adam would scale it up to a full step.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(unbiased=False) + eps) if scale_by_std else centred
