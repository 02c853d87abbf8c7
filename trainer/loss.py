"""The policy-gradient loss and the advantages, as pure functions of tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.recipe import AlgorithmSettings


class LossTerms(NamedTuple):
    """Sums over the unmasked tokens of a micro-batch; `loss` carries the gradient."""

    loss: Tensor
    pg_loss: Tensor
    clipped: Tensor
    ppo_kl: Tensor
    entropy: Tensor
    kl: Tensor


def group_advantages(rewards: Tensor, *, scale_by_std: bool, eps: float = 1e-4) -> Tensor:
    """GRPO's advantage of each sample of one group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    rewards [n] -> advantages [n]: r - mean(r), divided by the standard deviation of the group if `scale_by_std`. Equal rewards
    give exact zeros: rounding errors of their mean would give a gradient, and Adam would scale it up to a full step.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(unbiased=False) + eps) if scale_by_std else centred


def grpo_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    mask: Tensor,
    settings: AlgorithmSettings,
    ref_logprobs: Tensor | None = None,
) -> LossTerms:
    """Clipped surrogate (PPO, arXiv 1707.06347, formula 7), summed over tokens, not yet divided by their number.

    All arguments are [T], one entry per response token: `logprobs` and `entropy` of the policy in training,
    `rollout_logprobs` of the version that generated, `mask` 0 for tokens without loss, `ref_logprobs` of the initial policy,
    for a KL term.
    """
    log_ratios = log_ratio(logprobs, rollout_logprobs)
    ratio = log_ratios.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    pg_loss = (per_token * mask).sum()
    entropy_sum = (entropy * mask).sum()
    kl = torch.zeros_like(pg_loss) if ref_logprobs is None else (k3(logprobs, ref_logprobs) * mask).sum()
    return LossTerms(
        loss=pg_loss - settings.entropy_coef * entropy_sum + settings.kl_coef * kl,
        pg_loss=pg_loss.detach(),
        clipped=((clipped * advantages < ratio * advantages) * mask).sum(),
        ppo_kl=((ratio - 1 - log_ratios) * mask).sum().detach(),
        entropy=entropy_sum.detach(),
        kl=kl.detach(),
    )


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """log(p / p_other) of each token, [T], within +-20 (as verl): the gradient of an infinite ratio is NaN even when it is clipped."""
    return (logprobs - other_logprobs).clamp(-20, 20)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy | reference) from each token that the policy drew, [T]: r - 1 - log r with r = p_ref / p.

    Never negative and unbiased (J. Schulman, "Approximating KL divergence", 2020; DeepSeekMath, arXiv 2402.03300, formula 4).
    """
    log_ratios = log_ratio(ref_logprobs, logprobs)
    return log_ratios.exp() - 1 - log_ratios
