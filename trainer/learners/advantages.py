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
from ..algorithms.kl import KL_ESTIMATORS
from ..algorithms.reward_shaping import kl_to_go, overlong_penalty
from ..algorithms.whitening import whitened
from ..batch import loss_mask

Columns = Mapping[str, np.ndarray]


def row_advantages(batches: Sequence[Batch], recipe: Recipe, group: ActorGroup) -> dict[str, np.ndarray]:
    """By key of this rank's rows: one number for each token of the response, [R]; a collective of all ranks.

    The batches hold whole groups, but this rank may have only some rows of a group.
    """
    rows = {row.key: batch.columns[row.key] for batch in batches for row in batch.rows}
    groups = [group for batch in batches for group in batch.row_batch.groups]
    if not groups:
        return {}
    algorithm, estimator = recipe.algorithm, open_estimator(recipe.algorithm)
    rewards = _shaped_rewards([row for g in groups for row in g.rows()], rows, recipe, group)
    values = estimator.advantages(
        torch.tensor(list(rewards.values()), dtype=torch.float64), [len(g.samples) for g in groups]
    )
    of_response = dict(zip(rewards, values.tolist(), strict=True))
    found = {key: np.full(len(columns["response_ids"]), of_response[key]) for key, columns in rows.items()}
    if estimator.kl_to_go:
        found = {key: advantages - kl_to_go(kl_penalty(rows[key], algorithm)) for key, advantages in found.items()}
    if estimator.whitens:
        masks = [loss_mask(columns, mask_truncated=algorithm.mask_truncated) for columns in rows.values()]
        found = dict(zip(found, whitened(list(found.values()), masks, group.all_reduce_sum), strict=True))
    return found


def kl_penalty(columns: Columns, algorithm: AlgorithmSettings) -> np.ndarray:
    """[R], to subtract from the reward, of the policy that generated; zeros if the KL term is in the loss or there is none."""
    if algorithm.kl_in == "loss" or algorithm.kl_coef == 0:
        return np.zeros(len(columns["response_ids"]))
    ours, reference = (torch.from_numpy(columns[name]).double() for name in ("rollout_logprobs", "ref_logprobs"))
    kl = KL_ESTIMATORS[algorithm.kl_estimator](ours, reference).numpy()
    return algorithm.kl_coef * np.nan_to_num(kl) * columns["loss_mask"]


def _shaped_rewards(
    all_rows: list[RowRef], own: Mapping[str, Columns], recipe: Recipe, group: ActorGroup
) -> dict[str, float]:
    """By key of the rows of all ranks: the reward with its penalties, which only the rank with the row's columns knows."""
    algorithm = recipe.algorithm
    if not algorithm.overlong_buffer and algorithm.kl_in == "loss":
        return {row.key: row.reward for row in all_rows}
    penalty = partial(
        overlong_penalty,
        max_new_tokens=recipe.sampling.max_new_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )
    penalties = {key: penalty(len(columns["response_ids"])) for key, columns in own.items()}
    if not open_estimator(algorithm).kl_to_go:
        penalties = {key: value + float(kl_penalty(own[key], algorithm).sum()) for key, value in penalties.items()}
    everywhere = group.all_reduce_sum([penalties.get(row.key, 0.0) for row in all_rows])
    return {row.key: row.reward - value for row, value in zip(all_rows, everywhere, strict=True)}
