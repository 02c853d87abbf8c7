"""The advantages of a step's rows: shaped rewards, the estimator of `algorithm.advantage`, whitening."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ...comm.messages.queue import RowRef
from ...comm.recipe import AlgorithmSettings, Recipe
from ...relay.queue.batch import Batch
from ..actor_group import ActorGroup
from ..algorithms.advantages import open_estimator
from ..algorithms.gae import generalized_advantages
from ..algorithms.kl import KL_ESTIMATORS
from ..algorithms.reward_shaping import kl_to_go, overlong_penalty
from ..algorithms.whitening import whitened

Columns = Mapping[str, np.ndarray]


def add_advantages(batches: Sequence[Batch], recipe: Recipe, group: ActorGroup) -> None:
    """Add the column `advantages` [R] to this rank's rows that lack it, and `returns` [R] with a critic; a collective.

    The batches hold whole groups, but this rank may have only some rows of a group.
    """
    rows = {row.key: batch.columns[row.key] for batch in batches for row in batch.rows}
    groups = [group for batch in batches for group in batch.row_batch.groups]
    if not groups:
        return
    algorithm = recipe.algorithm
    estimator = open_estimator(recipe.algorithm)
    rewards = _shaped_rewards([row for g in groups for row in g.rows()], rows, recipe, group)
    values = estimator.advantages(
        torch.tensor(list(rewards.values()), dtype=torch.float64), [len(g.samples) for g in groups]
    )
    of_response = dict(zip(rewards, values.tolist(), strict=True))
    if estimator.has_critic:
        found = _of_critic(rows, of_response, algorithm)
    else:
        found = {key: np.full(len(columns["response_ids"]), of_response[key]) for key, columns in rows.items()}
        if estimator.kl_to_go:
            found = {key: found[key] - kl_to_go(kl_penalty(columns, algorithm)) for key, columns in rows.items()}
    if estimator.whitens:
        masks = [columns["loss_mask"] for columns in rows.values()]
        found = dict(zip(found, whitened(list(found.values()), masks, group.all_reduce_sum), strict=True))
    for key, advantages in found.items():
        rows[key].setdefault("advantages", advantages)


def _of_critic(
    rows: Mapping[str, dict[str, np.ndarray]], rewards: Mapping[str, float], algorithm: AlgorithmSettings
) -> dict[str, np.ndarray]:
    """GAE over the tokens with loss; the reward is the last one's. Adds the column `returns` [R], the critic's targets."""
    kept = {key: columns["loss_mask"] != 0 for key, columns in rows.items()}
    by_token = {key: -kl_penalty(columns, algorithm)[kept[key]] for key, columns in rows.items()}
    for key, part in by_token.items():
        part[-1:] += rewards[key]
    values = [columns["values"][kept[key]] for key, columns in rows.items()]
    advantages = generalized_advantages(list(by_token.values()), values, algorithm.gamma, algorithm.lam)
    found: dict[str, np.ndarray] = {}
    for (key, columns), part in zip(rows.items(), advantages, strict=True):
        found[key] = np.zeros(len(kept[key]))
        found[key][kept[key]] = part
        columns["returns"] = found[key] + columns["values"]
    return found


def kl_penalty(columns: Columns, algorithm: AlgorithmSettings) -> np.ndarray:
    """[R], to subtract from the reward, of the policy that generated; zeros if the KL term is in the loss or off."""
    if algorithm.kl_in == "loss" or algorithm.kl_coef == 0:
        return np.zeros(len(columns["response_ids"]))
    ours, reference = (torch.from_numpy(columns[name]).double() for name in ("rollout_logprobs", "ref_logprobs"))
    kl = KL_ESTIMATORS[algorithm.kl_estimator](ours, reference).numpy()
    return algorithm.kl_coef * kl * columns["loss_mask"]


def _shaped_rewards(
    all_rows: list[RowRef], own: Mapping[str, Columns], recipe: Recipe, group: ActorGroup
) -> dict[str, float]:
    """By key of the rows of all ranks: the reward with its penalties, which only the rank with the row's columns knows."""
    algorithm = recipe.algorithm
    if not algorithm.overlong_buffer and algorithm.kl_in == "loss":
        return {row.key: row.reward for row in all_rows}
    penalty = partial(
        overlong_penalty, max_new_tokens=recipe.sampling.max_new_tokens, buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )  # fmt: skip
    penalties = {key: penalty(len(columns["response_ids"])) for key, columns in own.items()}
    if not open_estimator(algorithm).kl_to_go:
        penalties = {key: value + float(kl_penalty(own[key], algorithm).sum()) for key, value in penalties.items()}
    everywhere = group.all_reduce_sum([penalties.get(row.key, 0.0) for row in all_rows])
    return {row.key: row.reward - value for row, value in zip(all_rows, everywhere, strict=True)}
