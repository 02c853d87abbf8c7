"""Generalized advantage estimation from the values of a critic, and the loss of the critic."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def generalized_advantages(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], gamma: float, lam: float
) -> list[np.ndarray]:
    """GAE (arXiv 1506.02438, formula 16) of each response: A_t = d_t + gamma lam A_(t+1), d_t = r_t + gamma V_(t+1) - V_t.

    rewards, values: [R] of each response, by token; the value after the last token is 0. The result is float64, [R] each.
    """
    longest = max(map(len, rewards), default=0)
    # All responses end in the last column, so that one sweep from the right serves them all.
    r, v = (np.zeros((len(rewards), longest + 1)) for _ in range(2))
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        start = longest - len(reward)
        r[row, start:longest] = reward
        v[row, start:longest] = value
    deltas = r[:, :-1] + gamma * v[:, 1:] - v[:, :-1]
    advantages = np.zeros_like(r)
    for t in range(longest - 1, -1, -1):
        advantages[:, t] = deltas[:, t] + gamma * lam * advantages[:, t + 1]
    return [advantages[row, longest - len(reward) : longest] for row, reward in enumerate(rewards)]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss by token (as verl): max((V - R)^2, (V_clip - R)^2) / 2, V_clip within `clip` of the old value.

    All arguments are [R]; a `clip` of 0 turns clipping off. Returns the loss [R] and whether the clip decided it, [R] bool.
    """
    free = (values - returns).square()
    if not clip:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(free, bounded) / 2, bounded > free
