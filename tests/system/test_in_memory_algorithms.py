"""Whole runs with algorithms that wait for all groups of a step, and with a user's own: each run is replayed bit for bit."""

import json
from pathlib import Path

import pytest
from support.system import System

from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.replay.replay import replay_steps
from headrace.trainer.step_log import StepReplay

REWARD = "def reward(prompts, completions, completion_ids, **rest):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
OWN = """
def squared(x):
    ratio = (x.logprobs - x.proximal_logprobs).exp()
    return (ratio - 1) ** 2 - ratio * x.advantages, ratio > 2


def ranks(rewards, group_sizes):
    return rewards.argsort().argsort() / len(rewards) - 0.5
"""
ALGORITHMS = {
    "REINFORCE++ with all penalties": {
        "algorithm.advantage": "reinforce_plus_plus",
        "algorithm.kl_in": "reward",
        "algorithm.kl_estimator": "k1",
        "algorithm.kl_coef": 0.1,
        "algorithm.overlong_buffer": 4,
        "algorithm.loss": "gspo",
        "algorithm.loss_agg": "seq-mean-token-mean",
    },
    "a user's own": {"algorithm.advantage": "own.py:ranks", "algorithm.loss": "own.py:squared"},
}


@pytest.mark.parametrize("settings", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_run_is_replayed_bit_for_bit(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    system = System(tmp_path, **({"optimizer.lr": 0.01, "run.steps": 6} | settings))
    (tmp_path / "rewards.py").write_text(REWARD)
    summary = system.start_all().wait()
    assert summary["accounting"]["holds"] is True
    steps = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 6 and all(0 < step["actor/grad_norm"] < 1e3 for step in steps)
    assert replay_steps(system.recipe) == 0
    assert "6 steps replayed, 0 of them differ" in capsys.readouterr().out


def test_a_row_says_whether_its_response_was_cut_at_its_longest_length(tmp_path: Path):
    system = System(tmp_path, **{"sampling.max_new_tokens": 40, "sampling.temperature": 1.5, "run.steps": 8})
    system.start_all().wait()
    batches = [batch for step in range(8) for batch in StepReplay(system.dir, step).batches()]
    rows = [batch.columns[row.key] for batch in batches for row in batch.rows]
    stop = load_tokenizer(tmp_path / "llama").eos_token_id
    cut = [bool(row["truncated"][0]) for row in rows]
    assert cut == [len(row["response_ids"]) == 40 and row["response_ids"][-1] != stop for row in rows]
    assert 0 < sum(cut) < len(cut)
    steps = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["response_length/clip_ratio"] for step in steps) * 4 == pytest.approx(sum(cut))
