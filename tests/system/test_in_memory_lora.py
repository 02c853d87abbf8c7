"""Whole runs that train an adapter: the versions that travel, the log-probs, the exports, under each schedule."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import plain_logprobs, random_prompts
from support.system import System
from transformers import AutoModelForCausalLM

from headrace.relay.hub import repacking
from headrace.relay.journal.events import Published
from headrace.relay.weights.checkpoint_source import CheckpointSource
from headrace.relay.weights.layout import Layout
from headrace.rollout.generators import builtin
from headrace.rollout.generators.base import GeneratorProfile
from headrace.rollout.generators.builtin import BuiltinGenerator
from headrace.trainer.policy.adapter_files import merged_weight, read_adapter
from headrace.trainer.policy.lora import adapter_shapes, target_layers
from headrace.trainer.policy.model import load_policy
from headrace.trainer.replay.replay import replay_steps
from headrace.trainer.step_log import StepReplay

REWARD = "def reward(completion_ids, **rest):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
LORA = {"lora.rank": 4, "optimizer.lr": 0.02, "run.steps": 4, "batch.prompts_per_step": 4, "roles.rollout": 2}
LONG = {"sampling.max_new_tokens": 60, "repack.period_s": 0.05}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts have measured that eight trajectories are decoded together, and that pages are worth sending."""
    monkeypatch.setattr(BuiltinGenerator, "profile", GeneratorProfile(8, math.inf))
    monkeypatch.setattr(repacking, "SLOWDOWN", math.inf)  # decode steps of a busy machine say little


def trained(
    folder: Path, settings: dict[str, Any], reward: str = REWARD
) -> tuple[System, dict[str, Any], list[dict[str, Any]]]:
    """A run of two replicas, its summary, and its metrics by step."""
    system = System(folder, **LORA | settings)
    (folder / "rewards.py").write_text(reward)
    replicas = system.recipe.num_replicas
    for index in range(system.recipe.roles.rollout - replicas):
        system.start("shard", builtin.run, index)
    summary = system.start_all(replicas).wait()
    assert summary["accounting"]["holds"] and summary["version"] == system.recipe.run.steps
    return system, summary, [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]


def model_at(path: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize("schedule", ["sync", "one_step", "stream", "partial", "headrace"])
def test_an_adapter_is_trained_under_every_schedule_and_replayed_bit_for_bit(tmp_path: Path, schedule: str):
    system, summary, steps = trained(tmp_path, LONG | {"run.schedule": schedule})
    assert all(0 < step["actor/grad_norm"] < 1e3 for step in steps)
    assert replay_steps(system.recipe) == 0
    tokens = torch.tensor([random_prompts(1, 30)[0]])
    with torch.no_grad():
        change = model_at(summary["export"])(tokens).logits - model_at(tmp_path / "llama")(tokens).logits
    assert change.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 2e-6),
        ({"generator.exact": "true"}, 0),
        ({"rollout.tp": 2}, 2e-6),
    ],
    ids=["builtin", "exact", "tp"],
)
def test_the_log_probs_of_generator_and_trainer_agree_at_equal_version(
    tmp_path: Path, changes: dict[str, object], bound: float
):
    _, _, steps = trained(tmp_path, {"run.schedule": "sync"} | changes)
    assert len(steps) == 4
    assert all(step["staleness/max"] == 0 and step["mismatch/logprob_abs_diff"] <= bound for step in steps)


def test_the_adapter_alone_travels_and_the_reference_is_the_base(tmp_path: Path):
    settings = {"algorithm.kl_coef": 0.1, "checkpoint.every": 2, "algorithm.advantage": "gae"}
    system, summary, steps = trained(tmp_path, settings)
    shapes = adapter_shapes(target_layers(load_policy(tmp_path / "llama").model, "all-linear"), 4)
    layout = Layout.of(shapes, torch.float32)
    assert {step["weights/bytes"] for step in steps} == {layout.num_bytes}
    assert layout.num_bytes == 4 * sum(shape.numel() for shape in shapes.values())

    base, num_rows = model_at(tmp_path / "llama"), 0
    for batch in StepReplay(system.dir, 3).batches():
        for row in batch.rows:
            columns = batch.columns[row.key]
            expected = plain_logprobs(base, columns["prompt_ids"].tolist(), columns["response_ids"].tolist())
            assert np.abs(columns["ref_logprobs"] - expected.numpy()).max() < 2e-5
            num_rows += 1
    assert num_rows == 8

    published = {event.version: event.digest for event in system.events() if isinstance(event, Published)}
    source = CheckpointSource(system.dir, lambda folder: read_adapter(folder / "adapter"))
    assert source.read(4, layout, np.zeros(layout.num_bytes, np.uint8)) == published[4]

    step = Path(summary["export"]).parent
    weights, adapter = load_policy(tmp_path / "llama").weights(), read_adapter(step / "adapter")
    merged = {name: merged_weight(name, weight, adapter, 16 / 4) for name, weight in weights.items()}
    exported = load_policy(step / "hf").weights()
    assert all(torch.equal(weight, exported[name]) for name, weight in merged.items())
    assert sum(file.stat().st_size for file in (step / "dcp").glob("*")) < 40 * layout.num_bytes


def test_a_run_continues_the_adapter_of_another_one(tmp_path: Path):
    (tmp_path / "again").mkdir()
    _, summary, _ = trained(tmp_path, {"run.steps": 2})
    adapter = Path(summary["export"]).with_name("adapter")
    settings = {"run.steps": 1, "run.schedule": "sync", "optimizer.lr": 0, "algorithm.advantage": "gae"}
    _, summary, steps = trained(tmp_path / "again", settings | {"lora.path": adapter})
    start, end = read_adapter(adapter), read_adapter(Path(summary["export"]).with_name("adapter"))
    assert any(weight.any() for name, weight in start.items() if name.endswith("lora_B"))
    assert all(torch.equal(weight, end[name]) for name, weight in start.items())
    assert steps[0]["mismatch/logprob_abs_diff"] <= 2e-6, "version 0 of the rollouts has the adapter"


def test_a_reward_rises_with_an_adapter(tmp_path: Path):
    reward = (
        "def reward(completion_ids, **rest):\n    return [sum(t < 40 for t in ids) / 8 for ids in completion_ids]\n"
    )
    settings = {"lora.rank": 8, "run.steps": 20, "batch.samples_per_prompt": 8, "sampling.max_new_tokens": 8}
    _, _, steps = trained(tmp_path, settings, reward)
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3, rewards
