"""A replay of saved steps has the bits of the run, whichever number of threads either process has."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
from support.actors import actor_of, batch_of, recipe_of, train
from support.policies import tiny_policy

from headrace.trainer.learners.base import Learner
from headrace.trainer.recovery import train_again
from headrace.trainer.replay_run import replay_steps
from headrace.trainer.step_log import StepLog, StepReplay

LOSS = """
import torch

NOISE = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

def loss(inputs):
    scale = NOISE.sum()  # its last bits depend on the number of threads
    return -inputs.advantages * inputs.logprobs * scale, torch.zeros_like(inputs.logprobs, dtype=torch.bool)
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path: Path):
    """Of a run whose loss depends on the number of threads, with one step that was trained with 2 of them."""
    policy = tiny_policy(tmp_path / "policy", "llama")
    (tmp_path / "own.py").write_text(LOSS)
    recipe = recipe_of(policy, run__dir=tmp_path, algorithm__loss=f"{tmp_path}/own.py:loss")
    torch.set_num_threads(2)
    log, batch = StepLog(tmp_path), batch_of(0)
    log.add(batch)
    log.write(0)
    metrics = {"step": 0, **train(actor_of(recipe), [batch])}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return recipe


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_replay_computes_with_the_threads_of_the_run_and_gives_the_caller_its_own_back(recipe, num_threads):
    torch.set_num_threads(num_threads)
    assert replay_steps(recipe) == 0
    assert torch.get_num_threads() == num_threads


def test_another_number_of_threads_than_the_run_s_gives_other_bits(recipe, monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(StepReplay, "same_threads", lambda _: nullcontext())
    torch.set_num_threads(1)
    assert replay_steps(recipe) == 1


def test_a_step_that_is_trained_again_has_the_bits_of_the_first_time(recipe):
    """A run that is resumed on another host has other threads there."""
    torch.set_num_threads(3)
    _, metrics = train_again(cast(Learner, actor_of(recipe)), Path(recipe.run.dir), 0)
    (recorded,) = map(json.loads, (Path(recipe.run.dir) / "metrics.jsonl").read_text().splitlines())
    assert metrics["actor/pg_loss"] == recorded["actor/pg_loss"]
    assert torch.get_num_threads() == 3
