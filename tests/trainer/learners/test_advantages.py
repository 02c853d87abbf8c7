"""The advantages of a step's rows: penalties change the rewards of whole groups, of which a rank may have only some rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.actors import ALONE, batch_of, recipe_of

from headrace.comm.recipe import Recipe
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.batch import trainable
from headrace.trainer.learners.advantages import add_advantages

KL_COEF, LONGEST, BUFFER = 0.3, 14, 8
KL = {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1", "algorithm.kl_coef": KL_COEF}
OVERLONG = {"sampling.max_new_tokens": LONGEST, "algorithm.overlong_buffer": BUFFER, "algorithm.overlong_penalty": 0.5}


class Rank(ActorGroup):
    """One of several ranks in turn: sums are those that all of them have given so far."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, ALONE.device, 1.0)
        self.add: Callable[[list[float]], list[float]] = lambda values: values

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return self.add(values)


def batch_with_references() -> Batch:
    batch = batch_of(0, num_groups=3, total=3)
    for columns in batch.columns.values():
        columns["ref_logprobs"] = (columns["rollout_logprobs"] + 0.1 * np.cos(columns["response_ids"])).astype(
            np.float32
        )
    return batch


def advantages_of(batch: Batch, recipe: Recipe, group: ActorGroup) -> dict[str, np.ndarray]:
    taken, _ = trainable(batch, mask_truncated=False)
    add_advantages([taken], recipe.algorithm, recipe.sampling.max_new_tokens, group)
    return {key: row.advantages for key, row in taken.by_key.items() if row.advantages is not None}


def penalty_of(columns: dict[str, np.ndarray]) -> float:
    kl = KL_COEF * (columns["rollout_logprobs"].astype(float) - columns["ref_logprobs"]).sum()
    return float(kl) + 0.5 * min(max(len(columns["response_ids"]) - (LONGEST - BUFFER), 0) / BUFFER, 1)


def centred_in_groups(batch: Batch, rewards: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for group in batch.row_batch.groups:
        keys = [row.key for row in group.rows()]
        mean = float(np.mean([rewards[key] for key in keys]))
        found |= {key: rewards[key] - mean for key in keys}
    return found


def without_std(**settings: object) -> Recipe:
    return recipe_of(Path("unused"), **({"algorithm.scale_rewards": "none"} | settings))


def test_penalties_are_subtracted_from_the_reward_before_the_baseline():
    batch = batch_with_references()
    rewards = {row.key: row.reward - penalty_of(batch.columns[row.key]) for row in batch.rows}
    found = advantages_of(batch, without_std(**KL, **OVERLONG), ALONE)
    for key, expected in centred_in_groups(batch, rewards).items():
        assert found[key] == pytest.approx(np.full(len(batch.columns[key]["response_ids"]), expected), abs=1e-6)


def test_a_token_of_reinforce_plus_plus_carries_the_kl_penalty_from_it_on():
    batch = batch_with_references()
    recipe = without_std(**KL, **{"algorithm.advantage": "reinforce_plus_plus"})
    expected: dict[str, np.ndarray] = {}
    for row in batch.rows:
        columns = batch.columns[row.key]
        kl = KL_COEF * (columns["rollout_logprobs"].astype(float) - columns["ref_logprobs"])
        expected[row.key] = row.reward - np.array([kl[token:].sum() for token in range(len(kl))])
    tokens = np.concatenate([*expected.values()])
    for key, values in advantages_of(batch, recipe, ALONE).items():
        assert values == pytest.approx((expected[key] - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), abs=1e-6)


def test_a_rank_needs_no_columns_of_the_rows_of_another_rank():
    whole, recipe = batch_with_references(), without_std(**KL, **OVERLONG)
    expected = advantages_of(whole, recipe, ALONE)
    given: list[list[float]] = []
    ranks = [Rank(number, 2) for number in range(2)]
    shares = [Batch(whole.row_batch, [whole.rows[number::2]], {}) for number in range(2)]
    for share in shares:
        share.columns.update({row.key: whole.columns[row.key] for row in share.rows})
    for rank, share in zip(ranks, shares, strict=True):
        rank.add = lambda values: given.append(values) or values
        advantages_of(share, recipe, rank)
    for rank, share in zip(ranks, shares, strict=True):
        rank.add = lambda _: [sum(values) for values in zip(*given, strict=True)]
        for key, values in advantages_of(share, recipe, rank).items():
            assert values == pytest.approx(expected[key], abs=1e-12)


def test_a_batch_whose_groups_could_not_be_read_has_no_advantages():
    batch = batch_with_references()
    empty = batch.without({group.group for group in batch.row_batch.groups})
    assert advantages_of(empty, without_std(**KL), ALONE) == {}


def test_a_log_prob_that_is_not_finite_adds_no_penalty():
    batch = batch_with_references()
    row = batch.rows[0]
    batch.columns[row.key]["ref_logprobs"][0] = np.nan
    assert all(np.isfinite(values).all() for values in advantages_of(batch, without_std(**KL), ALONE).values())
