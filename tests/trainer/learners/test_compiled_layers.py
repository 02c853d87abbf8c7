"""Compiled layers compute what the modules compute, for micro-batches of any number of tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.actors import actor_of, batch_of, recipe_of
from support.policies import tiny_policy
from torch._dynamo.utils import counters

from headrace.relay.queue.batch import Batch
from headrace.trainer.step_metrics import StepMetrics

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")


def with_one_prompt(batch: Batch) -> Batch:
    """Rows that share a prompt, each micro-batch a trie."""
    for columns in batch.columns.values():
        columns["prompt_ids"] = np.arange(20, 40).astype(np.int32)
    return replace(batch, micro_batches=[batch.rows], has_trees=True)


def gradient(policy: Path, *, is_compiled: bool) -> torch.Tensor:
    """Of eight micro-batches of rows alone, and of a trie."""
    actor = actor_of(recipe_of(policy, batch__prompts_per_step=5, trainer__compile=is_compiled))
    for batch in (batch_of(0, num_groups=4, total=5), with_one_prompt(batch_of(0, first=4, total=5))):
        actor.accumulate(batch, StepMetrics())
    return torch.cat([each.flatten() for each in actor.updater.take() if each is not None])


@pytest.mark.slow
def test_a_step_of_compiled_layers_is_that_of_the_modules(tmp_path):
    policy = tiny_policy(tmp_path, "llama", num_hidden_layers=3)
    expected = gradient(policy, is_compiled=False)
    counters.clear()
    found = gradient(policy, is_compiled=True)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert 0 < counters["stats"]["unique_graphs"] <= 4, "one for all layers, before and behind attention"
