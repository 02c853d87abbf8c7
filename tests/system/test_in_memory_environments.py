"""The whole system in memory with an environment: turns, masks and rewards arrive in training, under every schedule."""

from pathlib import Path

import numpy as np
import pytest
from support.system import TURNS, System

from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.replay import replay_steps
from headrace.trainer.step_log import StepReplay


@pytest.mark.parametrize("schedule", ["sync", "one_step", "stream", "partial", "headrace"])
def test_turns_and_what_is_between_them_are_trained_under_each_schedule(tmp_path: Path, schedule: str):
    path = f"{tmp_path / 'environments.py'}:Counter"
    words = {"run.schedule": schedule, "roles.rollout": 2, "environment.path": path, "reward.path": ""}
    system = System(tmp_path, **TURNS | words).start_all(num_rollouts=2)
    summary = system.wait()
    assert summary["accounting"]["holds"] and summary["accounting"]["failed"] == 0
    tokenizer = load_tokenizer(tmp_path / "llama")
    num_turns = 0
    for step in range(3):
        for batch in StepReplay(system.dir, step).batches():
            for row in batch.rows:
                columns = batch.columns[row.key]
                mask, tokens = columns["loss_mask"], columns["response_ids"]
                inserted = tokenizer.decode(tokens[mask == 0], skip_special_tokens=True)
                answers = inserted.split("]")[:-1]
                assert [answer.split()[0] for answer in answers] == [f"[{i + 1}" for i in range(len(answers))]
                assert not columns["rollout_logprobs"][mask == 0].any() and columns["rollout_logprobs"][mask == 1].all()
                assert tokenizer.decode(columns["prompt_ids"], skip_special_tokens=True).endswith(")")
                edges = np.flatnonzero(np.diff(mask.astype(int)) == 1)
                lengths = [int(answer.split()[1]) for answer in answers]
                assert len(edges) == len(answers) - (mask[-1] == 0)
                assert columns["reward"][0] >= (lengths[-1] if lengths else 0) / 8, "the sum of the turns' rewards"
                num_turns += len(answers)
    assert num_turns > 12
    if schedule == "headrace":
        assert replay_steps(system.recipe) == 0
