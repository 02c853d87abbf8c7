"""The advantages of a step's rows: shaped rewards, the estimator of `algorithm.advantage`, whitening."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ...comm.messages.queue import RowRef
from ...comm.recipe import AlgorithmSettings
from ..actor_group import ActorGroup
from ..algorithms.advantages import open_estimator
from ..algorithms.gae import generalized_advantages
from ..algorithms.kl import KL_ESTIMATORS
from ..algorithms.reward_shaping import kl_to_go, overlong_penalty
from ..algorithms.whitening import whitened
from ..batch import Trajectory, TrajectoryBatch


def add_advantages(
    batches: Sequence[TrajectoryBatch], algorithm: AlgorithmSettings, max_new_tokens: int, group: ActorGroup
) -> None:
    """Give this rank's rows `advantages` [R] where they lack them, and `returns` [R] with a critic; a collective.

    The batches hold whole groups, but this rank may have only some rows of a group.
    """
    rows = {key: row for batch in batches for key, row in batch.by_key.items()}
    groups = [group for batch in batches for group in batch.batch.row_batch.groups]
    if not groups:
        return
    estimator = open_estimator(algorithm)
    rewards = _shaped_rewards([row for g in groups for row in g.rows()], rows, algorithm, max_new_tokens, group)
    values = estimator.advantages(
        torch.tensor(list(rewards.values()), dtype=torch.float64), [len(g.samples) for g in groups]
    )
    of_response = dict(zip(rewards, values.tolist(), strict=True))
    if estimator.has_critic:
        found = _of_critic(rows, of_response, algorithm)
    else:
        found = {key: np.full(len(row.response_ids), of_response[key]) for key, row in rows.items()}
        if estimator.kl_to_go:
            found = {key: found[key] - _kl_to_go(row, algorithm) for key, row in rows.items()}
    if estimator.whitens:
        masks = [row.loss_mask for row in rows.values()]
        found = dict(zip(found, whitened(list(found.values()), masks, group.all_reduce_sum), strict=True))
    for key, advantages in found.items():
        if rows[key].advantages is None:
            rows[key].advantages = advantages


def _of_critic(
    rows: Mapping[str, Trajectory], rewards: Mapping[str, float], algorithm: AlgorithmSettings
) -> dict[str, np.ndarray]:
    """GAE over the tokens with loss; the reward is the last one's, in each branch. Adds `returns` [R], the critic's targets."""
    by_token: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for key, row in rows.items():
        assert row.values is not None, "the critic has not seen this row"
        penalty = kl_penalty(row, algorithm)
        for mask, kl, value in zip(*map(row.of_branches, (row.loss_mask, penalty, row.values)), strict=True):
            part = -kl[mask != 0]
            part[-1:] += rewards[key]
            by_token.append(part)
            values.append(value[mask != 0])
    advantages = iter(generalized_advantages(by_token, values, algorithm.gamma, algorithm.lam))
    found: dict[str, np.ndarray] = {}
    for key, row in rows.items():
        found[key] = np.zeros(len(row.loss_mask))
        for mask, part in zip(*map(row.of_branches, (row.loss_mask, found[key])), strict=True):
            part[mask != 0] = next(advantages)  # a view of the row's
        row.returns = found[key] + row.values
    return found


def _kl_to_go(row: Trajectory, algorithm: AlgorithmSettings) -> np.ndarray:
    """[R], of each branch apart."""
    return np.concatenate([kl_to_go(part) for part in row.of_branches(kl_penalty(row, algorithm))])


def kl_penalty(row: Trajectory, algorithm: AlgorithmSettings) -> np.ndarray:
    """[R], to subtract from the reward, of the policy that generated; zeros if the KL term is in the loss or off."""
    if algorithm.kl_in == "loss" or algorithm.kl_coef == 0:
        return np.zeros(len(row.response_ids))
    assert row.ref_logprobs is not None, "the reference has not seen this row"
    ours = torch.from_numpy(row.rollout_logprobs).double()
    reference = torch.from_numpy(row.ref_logprobs).double()
    kl = KL_ESTIMATORS[algorithm.kl_estimator](ours, reference).numpy()
    return algorithm.kl_coef * kl * row.loss_mask


def _shaped_rewards(
    all_rows: list[RowRef],
    own: Mapping[str, Trajectory],
    algorithm: AlgorithmSettings,
    max_new_tokens: int,
    group: ActorGroup,
) -> dict[str, float]:
    """The reward with its penalties, by key, of the rows of all ranks: only the rank that has a row knows it."""
    if not algorithm.overlong_buffer and algorithm.kl_in == "loss":
        return {row.key: row.reward for row in all_rows}
    penalty = partial(
        overlong_penalty, max_new_tokens=max_new_tokens, buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )  # fmt: skip
    penalties = {key: penalty(len(row.response_ids)) for key, row in own.items()}
    if not open_estimator(algorithm).kl_to_go:
        penalties = {key: value + float(kl_penalty(own[key], algorithm).sum()) for key, value in penalties.items()}
    everywhere = group.all_reduce_sum([penalties.get(row.key, 0.0) for row in all_rows])
    return {row.key: row.reward - value for row, value in zip(all_rows, everywhere, strict=True)}
