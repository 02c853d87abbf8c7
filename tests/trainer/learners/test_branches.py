"""The branches of a row are trained as if each were a row of its own, with the advantage of their row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.actors import ALONE, actor_of, recipe_of
from support.algorithm_steps import batches_of
from support.policies import tiny_policy

from headrace.relay.queue.batch import Batch
from headrace.trainer.batch import NUMBERS, Trajectory, pack
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
