"""The branches of a row are trained as if each were a row of its own, with the advantage of their row."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.actors import ALONE, actor_of, recipe_of
from support.algorithm_steps import batches_of
from support.policies import tiny_policy

from headrace.comm.recipe import AlgorithmSettings
from headrace.relay.queue.batch import Batch
from headrace.trainer.algorithms.aggregation import token_weights
from headrace.trainer.algorithms.corrections import importance_weights
from headrace.trainer.algorithms.objective import token_losses
from headrace.trainer.batch import NUMBERS, PackedBatch, Trajectory, pack
from headrace.trainer.learners.advantages import _kl_to_go, _of_critic, kl_penalty
from headrace.trainer.logprobs import packed_logprobs, response_logprobs

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def tokens(*numbers: int) -> Array:
    return np.array(numbers, np.int32)


def branches() -> list[tuple[Array, Array, Array]]:
    """(prompt, response, loss mask); the second branch begins as the first does, the third with other tokens."""
    start = [5, 6, 7, 8, 9, 10]
    return [
        (tokens(*start), tokens(20, 21, 30, 22), tokens(1, 1, 0, 1)),
        (tokens(*start, 20, 21, 31), tokens(23, 24), tokens(1, 1)),
        (tokens(40, 41), tokens(25), tokens(1)),
    ]


def packed_row() -> Trajectory:
    """The branches in one row."""
    (prompt, response, mask), *others = branches()
    starts: list[int] = []
    for their_prompt, their_response, their_mask in others:
        starts.append(len(prompt) + len(response))
        response = np.concatenate([response, their_prompt, their_response])
        mask = np.concatenate([mask, np.zeros_like(their_prompt), their_mask])
    number = np.zeros(len(response), np.float32)
    return Trajectory(prompt, response, number, mask, version=0, advantages=number + 1, branch_starts=tokens(*starts))


def own_rows() -> list[Trajectory]:
    """Each branch in a row of its own."""
    return [
        Trajectory(prompt, response, number := np.zeros(len(response), np.float32), mask, 0, advantages=number + 1)
        for prompt, response, mask in branches()
    ]


@pytest.mark.parametrize("longest_in_tree", [0, 100], ids=["alone", "tree"])
def test_the_log_probs_of_branches_are_those_of_rows_of_their_own(policy_dir: Path, longest_in_tree: int):
    actor = actor_of(recipe := recipe_of(policy_dir))
    found: list[torch.Tensor] = []
    for rows in ([packed_row()], own_rows()):
        batch = pack(rows, 0, torch.device("cpu"), longest_in_tree=longest_in_tree)
        assert (batch.tree is not None) == (longest_in_tree > 0)
        logprobs, _ = packed_logprobs(actor.policy, batch, recipe)
        found.append(logprobs[batch.mask > 0])
    assert len(found[0]) == 6
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=0)


def batch_of_a_row(recipe: Any) -> Batch:
    """A batch of one group of one row, with the columns that a rollout writes for branches."""
    (batch,) = batches_of(recipe, (1,), ALONE)
    row = packed_row()
    ref = batch.rows[0]
    columns = {**batch.columns[ref.key], "prompt_ids": row.prompt_ids, "response_ids": row.response_ids}
    columns |= {name: row.rollout_logprobs for name in NUMBERS if name in columns}
    columns |= {"loss_mask": row.loss_mask.astype(np.uint8), "versions": np.zeros(len(row.response_ids), np.int32)}
    assert row.branch_starts is not None
    return replace(batch, micro_batches=[[ref]], columns={ref.key: {**columns, "branch_starts": row.branch_starts}})


def test_a_row_from_the_queue_keeps_its_branches(policy_dir: Path):
    actor = actor_of(recipe := recipe_of(policy_dir))
    batch = batch_of_a_row(recipe)
    (numbers,) = response_logprobs(actor.policy, batch, torch.device("cpu"), recipe)
    own = pack(own_rows(), 0, torch.device("cpu"))
    expected = packed_logprobs(actor.policy, own, recipe)[0][own.mask > 0].detach().numpy()
    mask = batch["loss_mask"][0] > 0
    np.testing.assert_allclose(numbers[mask], expected, atol=2e-5)
    assert Trajectory.of(batch.rows[0], batch.columns[batch.rows[0].key]).branch_starts is not None


def drawn_of(row: Trajectory) -> list[list[int]]:
    """The places in the response of the drawn tokens of each branch."""
    starts = [0, *(start - len(row.prompt_ids) for start in row.branch_starts.tolist()), len(row.response_ids)]  # pyright: ignore[reportOptionalMemberAccess]
    return [[at for at in range(low, high) if row.loss_mask[at]] for low, high in pairwise(starts)]


def with_numbers(seed: int = 0, spread: float = 0.4) -> tuple[PackedBatch, torch.Tensor]:
    """The row as a batch in float64, drawn by another policy, and the log-probs of the one in training."""
    random = np.random.default_rng(seed)
    batch = pack([packed_row()], 0, torch.device("cpu"))
    num_tokens = len(batch.mask)
    batch.mask = batch.mask.double()
    batch.rollout_logprobs = torch.from_numpy(random.normal(-2, 0.5, num_tokens)) * batch.mask
    batch.advantages = torch.full((num_tokens,), 0.75, dtype=torch.float64)
    return batch, batch.rollout_logprobs + torch.from_numpy(random.normal(0, spread, num_tokens)) * batch.mask


def test_the_ratio_of_gspo_is_the_mean_of_each_branch_alone():
    batch, logprobs = with_numbers()
    algorithm = AlgorithmSettings(loss="gspo", proximal="rollout", importance_sampling_cap=1e9, clip_dual=None)
    found = token_losses(logprobs, batch, algorithm)[0]
    ratios: list[float] = []
    for places in drawn_of(packed_row()):
        mean = sum(float(logprobs[at] - batch.rollout_logprobs[at]) for at in places) / len(places)
        ratios.append(math.exp(mean))
        clipped = min(max(ratios[-1], 1 - algorithm.clip_low), 1 + algorithm.clip_high)
        for at in places:
            assert float(found[at]) == pytest.approx(-min(ratios[-1] * 0.75, clipped * 0.75), rel=1e-12)
    assert len({*ratios}) == 3


@pytest.mark.parametrize("kind", ["sequence_truncate", "sequence_mask"])
def test_the_weight_of_a_sequence_is_the_product_of_each_branch_alone(kind: Any):
    batch, logprobs = with_numbers(seed=3, spread=0.1)
    algorithm = AlgorithmSettings(importance_sampling=kind, importance_sampling_cap=1.2)
    weights, _ = importance_weights(logprobs, batch, algorithm)
    expected: list[float] = []
    for places in drawn_of(packed_row()):
        product = math.exp(sum(float(logprobs[at] - batch.rollout_logprobs[at]) for at in places))
        is_within = 1 / 1.2 <= product <= 1.2
        expected.append(min(product, 1.2) if kind == "sequence_truncate" else product * is_within)
        for at in places:
            assert float(weights[at]) == pytest.approx(expected[-1], rel=1e-12)
    assert len({*expected}) > 1


def test_a_mean_over_responses_counts_the_row_once():
    batch, _ = with_numbers()
    weights = token_weights("seq-mean-token-mean", batch.mask, batch.response_lengths, 100)
    assert weights.weight == 1 and weights.tokens.sum() == pytest.approx(1)


def test_gae_goes_through_each_branch_alone_and_each_ends_with_the_reward():
    row = packed_row()
    row.values = np.random.default_rng(1).normal(size=len(row.response_ids))
    algorithm = AlgorithmSettings(advantage="gae", gamma=0.9, lam=0.8)
    found = _of_critic({"row": row}, {"row": 2.0}, algorithm)["row"]
    for places in drawn_of(row):
        later = 0.0
        for place, following in reversed([*zip(places, [*places[1:], None], strict=True)]):
            reward, value_after = (2.0, 0.0) if following is None else (0.0, float(row.values[following]))
            later = reward + 0.9 * value_after - float(row.values[place]) + 0.9 * 0.8 * later
            assert found[place] == pytest.approx(later, rel=1e-12)
    assert not found[row.loss_mask == 0].any()
    assert row.returns is not None
    np.testing.assert_allclose(row.returns, found + row.values)


def test_the_kl_penalty_from_a_token_on_ends_with_its_branch():
    row = packed_row()
    random = np.random.default_rng(2)
    row.rollout_logprobs, row.ref_logprobs = random.normal(-2, 0.5, (2, len(row.response_ids))).astype(np.float32)
    algorithm = AlgorithmSettings(kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    penalty = kl_penalty(row, algorithm)
    found = _kl_to_go(row, algorithm)
    for places in drawn_of(row):
        for at in places:
            assert found[at] == pytest.approx(sum(penalty[later] for later in places if later >= at), rel=1e-12)
