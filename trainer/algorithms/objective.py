"""The loss of a micro-batch: the policy's loss by token, an entropy bonus and a KL term, aggregated."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.recipe import AlgorithmSettings
from ..batch import PackedBatch
from .aggregation import token_mean
from .kl import k3
from .losses import LOSSES, MAX_LOG_RATIO, LossInputs


class LossTerms(NamedTuple):
    """Sums over a micro-batch; only `loss` carries a gradient.

    `loss` and `pg_loss` are aggregated sums, to be divided by the step's sum of `weight`. The others are sums over tokens
    with loss.
    """

    loss: Tensor
    pg_loss: Tensor
    weight: Tensor
    clipped: Tensor
    ppo_kl: Tensor
    entropy: Tensor
    kl: Tensor


def policy_loss(logprobs: Tensor, entropy: Tensor, batch: PackedBatch, settings: AlgorithmSettings) -> LossTerms:
    """The loss of the policy in training: logprobs, entropy [R] of the batch's response tokens."""
    per_token, clipped = LOSSES["clip"](
        LossInputs(
            logprobs=logprobs,
            old_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            lengths=batch.response_lengths,
            clip_low=logprobs.new_tensor(settings.clip_low),
            clip_high=logprobs.new_tensor(settings.clip_high),
        )
    )
    kl = torch.zeros_like(logprobs) if batch.ref_logprobs is None else k3(logprobs, batch.ref_logprobs)
    weights = token_mean(batch.mask)
    pg_loss = (per_token * weights.tokens).sum()
    extra = settings.kl_coef * kl - settings.entropy_coef * entropy
    log_ratio = (logprobs.detach() - batch.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return LossTerms(
        loss=pg_loss + (extra * weights.tokens).sum(),
        pg_loss=pg_loss.detach(),
        weight=weights.weight,
        clipped=(clipped * batch.mask).sum(),
        ppo_kl=((log_ratio.exp() - 1 - log_ratio) * batch.mask).sum(),
        entropy=(entropy * batch.mask).sum().detach(),
        kl=(kl * batch.mask).sum().detach(),
    )
