"""Packing lays trajectories end to end and points at the states that predict their tokens."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.batch import Trajectory, micro_batches, pack


def trajectory(prompt: list[int], response: list[int], version: int = 0, advantage: float = 0.0) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        rollout_logprobs=-np.ones(len(response), dtype=np.float32),
        loss_mask=np.ones(len(response), dtype=np.uint8),
        version=version,
        reward=0.0,
        advantage=advantage,
    )


def test_each_target_is_predicted_by_the_token_before_it():
    batch = pack([trajectory([5, 6], [7, 8]), trajectory([9], [10])], version=0, device=torch.device("cpu"))
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.predictors.tolist() == [1, 2, 4]
    assert batch.token_ids[batch.predictors + 1].tolist() == batch.targets.tolist()


def test_advantages_and_freshness_are_spread_over_the_tokens():
    batch = pack([trajectory([1], [2, 3], 4, 0.5), trajectory([1], [2], 3, -1.0)], 4, torch.device("cpu"))
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0]
    assert batch.is_fresh.tolist() == [True, True, False]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), budget=st.integers(10, 60))
def test_micro_batches_keep_everything_and_the_budget(lengths: list[int], budget: int):
    trajectories = [trajectory([1], [2] * n) for n in lengths]
    parts = list(micro_batches(trajectories, budget))
    assert sorted(id(t) for part in parts for t in part) == sorted(id(t) for t in trajectories)
    assert all(sum(t.num_tokens for t in part) <= budget or len(part) == 1 for part in parts)
