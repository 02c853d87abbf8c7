"""Packing joins trajectories end to end and finds the hidden states that predict their tokens."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import RowId
from headrace.comm.messages.queue import RowRef
from headrace.relay.queue.micro_batches import rounds
from headrace.trainer.batch import PackedBatch, Trajectory, pack


def trajectory(prompt: list[int], response: list[int], version: int = 0, advantage: float = 0.0) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        rollout_logprobs=-np.ones(len(response), dtype=np.float32),
        loss_mask=np.ones(len(response), dtype=np.uint8),
        version=version,
        advantages=np.full(len(response), advantage, np.float32),
    )


def test_each_target_is_predicted_by_the_token_before_it():
    batch = pack([trajectory([5, 6], [7, 8]), trajectory([9], [10])], version=0, device=torch.device("cpu"))
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.predictors.tolist() == [1, 2, 4]
    assert batch.token_ids[batch.predictors + 1].tolist() == batch.targets.tolist()


def packed_as_tree(*rows: tuple[list[int], list[int]]) -> PackedBatch:
    return pack([trajectory(*row) for row in rows], 0, torch.device("cpu"), longest_in_tree=100)


def test_rows_with_a_common_beginning_become_a_tree_in_which_a_token_predicts_those_of_several_rows():
    batch = packed_as_tree(([5, 6, 7, 8], [1, 2]), ([5, 6, 7, 8], [3]), ([5, 6, 7, 8], [1, 4]))
    assert batch.tree is not None
    assert batch.tree.token_ids.tolist() == [5, 6, 7, 8, 1, 2, 1, 4, 3], (
        "one common token more is too short for a branch"
    )
    assert batch.predictors.tolist() == [3, 4, 3, 3, 6]
    assert batch.targets.tolist() == [1, 2, 3, 1, 4] and batch.response_lengths.tolist() == [2, 1, 2]


def test_rows_with_little_in_common_or_too_long_for_a_tree_are_packed_alone():
    prompt = [5, 6, 7, 8]
    assert packed_as_tree((prompt[:3], [1, 2]), (prompt[:3], [3])).tree is None, "three tokens are too few"
    assert packed_as_tree((prompt, [1] * 90), (prompt, [2] * 90)).tree is None, "less than 5 % of the tokens"
    assert packed_as_tree((prompt, [1] * 97), (prompt, [1] * 97)).tree is None, "more than 100 tokens"
    assert packed_as_tree((prompt, [1] * 96), (prompt, [1] * 96)).tree is not None
    assert pack([trajectory(prompt, [1])] * 2, 0, torch.device("cpu")).tree is None


def test_advantages_and_freshness_are_spread_over_the_tokens():
    batch = pack([trajectory([1], [2, 3], 4, 0.5), trajectory([1], [2], 3, -1.0)], 4, torch.device("cpu"))
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0]
    assert batch.is_fresh.tolist() == [True, True, False]


def test_staleness_is_that_of_each_token():
    mixed = replace(trajectory([1], [2, 3], 3), versions=np.array([3, 4], np.int32))
    batch = pack([mixed, trajectory([1], [2], 1)], 4, torch.device("cpu"))
    assert batch.staleness.tolist() == [1, 0, 3]
    assert batch.is_fresh.tolist() == [False, True, False]
    assert not pack([mixed], 4, torch.device("cpu"), is_updated=True).is_fresh.any()


def row_of(number: int, num_tokens: int) -> RowRef:
    return RowRef(RowId(0, number, 0), 1, ["relay-0#1"], 0, num_tokens, 0.0)


def test_a_users_column_named_version_is_not_the_rows_version():
    names = ("prompt_ids", "response_ids", "rollout_logprobs", "loss_mask", "advantages", "version")
    assert Trajectory.of(row_of(3, 2), {name: np.zeros(2) for name in names}).version == row_of(3, 2).version


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    num_ranks=st.integers(1, 4),
    budget=st.integers(10, 60),
)
def test_rounds_give_each_rank_equally_many_parts_with_all_rows_within_the_budget(
    lengths: list[int], num_ranks: int, budget: int
):
    planned = rounds([row_of(number, length) for number, length in enumerate(lengths)], num_ranks, budget)
    assert all(len(parts) == num_ranks for parts in planned)
    assert sorted(r.row.prompt for parts in planned for part in parts for r in part) == list(range(len(lengths)))
    assert all(sum(r.num_tokens for r in part) <= budget or len(part) == 1 for parts in planned for part in parts)
    loads = [sum(r.num_tokens for parts in planned for r in parts[rank]) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(lengths)
