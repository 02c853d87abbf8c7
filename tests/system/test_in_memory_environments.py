"""The whole system in memory with an environment: turns, masks and rewards arrive in training, under every schedule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.system import TURNS, System

from headrace.relay.journal.events import Evaluated
from headrace.rollout.generators import builtin
from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.replay.replay import replay_steps
from headrace.trainer.step_log import StepReplay


def trained(folder: Path, **settings: object) -> System:
    """A run with an environment that has ended; its account holds, and each trained row is the turns and the answers to them."""
    path = f"{folder / 'environments.py'}:Counter"
    system = System(folder, **TURNS | {"roles.rollout": 2, "environment.path": path, "reward.path": ""} | settings)
    replicas = system.recipe.num_replicas
    for index in range(system.recipe.roles.rollout - replicas):
        system.start("shard", builtin.run, index)
    summary = system.start_all(replicas).wait()
    assert summary["accounting"]["holds"] and summary["accounting"]["failed"] == 0
    tokenizer = load_tokenizer(folder / "llama")
    num_turns = 0
    for step in range(system.recipe.run.steps):
        for batch in StepReplay(system.dir, step).batches():
            for row in batch.rows:
                num_turns += check_turns(batch.columns[row.key], tokenizer)
    assert num_turns > 4 * system.recipe.run.steps
    return system


def check_turns(columns: dict[str, np.ndarray], tokenizer: Any) -> int:
    """Check one trained row of `Counter`; returns the number of answers in it."""
    mask, tokens = columns["loss_mask"], columns["response_ids"]
    inserted = tokenizer.decode(tokens[mask == 0], skip_special_tokens=True)
    answers = inserted.split("]")[:-1]
    assert [answer.split()[0] for answer in answers] == [f"[{i + 1}" for i in range(len(answers))]
    assert not columns["rollout_logprobs"][mask == 0].any() and columns["rollout_logprobs"][mask == 1].all()
    prompt = tokenizer.decode(columns["prompt_ids"], skip_special_tokens=True)
    assert prompt.endswith(")")
    edges = np.flatnonzero(np.diff(mask.astype(int)) == 1)
    lengths = [int(answer.split()[1]) for answer in answers]
    assert len(edges) == len(answers) - (mask[-1] == 0)
    assert columns["reward"][0] >= (lengths[-1] if lengths else 0) / 8, "the sum of the turns' rewards"
    return len(answers)


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("sync", {"rollout.tp": 2}),
        ("one_step", {"lora.rank": 4, "optimizer.lr": 0.02}),
        ("stream", {}),
        ("stream_sync", {}),
        ("partial", {}),
        ("headrace", {}),
    ],
    ids=["sync-tp", "one_step-lora", "stream", "stream_sync", "partial", "headrace"],
)
def test_turns_and_what_is_between_them_are_trained_under_each_schedule(
    tmp_path: Path, schedule: str, settings: dict[str, object]
):
    system = trained(tmp_path, **{"run.schedule": schedule} | settings)
    assert replay_steps(system.recipe) == 0


def test_an_evaluation_talks_to_environments_too_and_has_their_rewards(tmp_path: Path):
    (tmp_path / "test.jsonl").write_text("".join(f'{{"prompt": "test {i}"}}\n' for i in range(8)))
    settings = {
        "eval.path": tmp_path / "test.jsonl",
        "eval.every": 2,
        "run.steps": 2,
        "optimizer.lr": 0,
    }
    system = trained(tmp_path, **settings)
    scores = [event for event in system.events() if isinstance(event, Evaluated)]
    assert len(scores) == 2 * 8 and not any(event.failure for event in scores)
    first, last = ([event.reward for event in sorted(part, key=lambda e: e.row)] for part in (scores[:8], scores[8:]))
    assert first == last and len(set(first)) > 1, "the weights are the same, and so are the turns"
