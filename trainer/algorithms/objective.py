"""The loss of a micro-batch: the policy's loss by token, an entropy bonus and a KL term, aggregated."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.messages.queue import GroupRef
from ...comm.recipe import AlgorithmSettings, SamplingSettings, TaskSettings
from ..batch import PackedBatch
from .advantages import open_estimator
from .aggregation import token_weights
from .corrections import Correction, correct, pull_to_generator
from .kl import KL_ESTIMATORS, k3
from .losses import LossInputs, open_loss


class LossTerms(NamedTuple):
    """Sums over a micro-batch; only `loss` carries a gradient.

    `loss` and `pg_loss` are aggregated sums, to be divided by the step's sum of `weight`. The others are sums over tokens
    with loss: `limited` those of older versions whose importance weight is bounded, `limited_fresh` the others.
    """

    loss: Tensor
    pg_loss: Tensor
    weight: Tensor
    clipped: Tensor
    limited: Tensor
    limited_fresh: Tensor
    ppo_kl: Tensor
    entropy: Tensor
    kl: Tensor


class TokenLosses(NamedTuple):
    """By token [R]: the loss times its importance weight, whether the clip bounds its ratio, and the correction."""

    loss: Tensor
    is_clipped: Tensor
    correction: Correction


def has_gradient(algorithm: AlgorithmSettings, tasks: Sequence[TaskSettings], group: GroupRef) -> bool:
    """Whether a group can add to the gradient of the policy.

    A group with equal rewards cannot if its advantages are 0 and the loss has no other term: not the entropy, nor the KL
    divergence, nor the load of routers, nor what a user's function may add. Its tokens count in the mean of the step all the same.
    """
    adds_more = algorithm.entropy_coef or algorithm.kl_coef or algorithm.router_aux_coef or ":" in algorithm.loss
    has_own_advantages = algorithm.overlong_buffer or any("advantages" in task.yields for task in tasks)
    is_relative = open_estimator(algorithm).is_relative and not has_own_advantages
    return bool(adds_more) or not is_relative or len(set(group.rewards)) > 1


def token_losses(logprobs: Tensor, batch: PackedBatch, algorithm: AlgorithmSettings) -> TokenLosses:
    """The losses of a batch's response tokens before aggregation, without the entropy bonus and the KL term; logprobs [R]."""
    correction = correct(logprobs, batch, algorithm)
    losses, is_clipped = open_loss(algorithm.loss)(
        LossInputs(
            logprobs=logprobs,
            proximal_logprobs=correction.proximal_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            lengths=batch.sequence_lengths,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            behaviour_logprobs=batch.rollout_logprobs,
            clip_dual=algorithm.clip_dual,
        )
    )
    return TokenLosses(losses * correction.weight, is_clipped, correction)


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: PackedBatch,
    algorithm: AlgorithmSettings,
    sampling: SamplingSettings,
) -> LossTerms:
    """The loss of the policy in training: logprobs, entropy [R] of the batch's response tokens."""
    per_token, clipped, correction = token_losses(logprobs, batch, algorithm)
    weights = token_weights(algorithm.loss_agg, batch.mask, batch.response_lengths, sampling.max_new_tokens)
    loss = per_token
    if (pull := pull_to_generator(logprobs, batch, algorithm)) is not None:
        loss = loss + pull
    if algorithm.entropy_coef != 0:  # a gradient of zeros would cost the backward pass a matrix [rows, vocab]
        loss = loss - algorithm.entropy_coef * entropy
    kl = torch.zeros_like(logprobs)
    if batch.ref_logprobs is not None:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logprobs, batch.ref_logprobs)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * kl
    return LossTerms(
        loss=(loss * weights.tokens).sum(),
        pg_loss=(per_token * weights.tokens).sum().detach(),
        weight=weights.weight,
        clipped=(clipped * batch.mask).sum(),
        limited=(correction.is_limited & ~batch.is_fresh & (batch.mask > 0)).sum(),
        limited_fresh=(correction.is_limited & batch.is_fresh & (batch.mask > 0)).sum(),
        ppo_kl=(k3(batch.rollout_logprobs, logprobs) * batch.mask).sum().detach(),
        entropy=(entropy * batch.mask).sum().detach(),
        kl=(kl * batch.mask).sum().detach(),
    )
