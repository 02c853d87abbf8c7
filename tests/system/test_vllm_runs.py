"""Whole runs whose trajectories vLLM generates, in processes of their own."""

import os
import signal
from pathlib import Path
from statistics import mean

import pytest
from support.job import Job, MakeJob, assert_account_adds_up, child_of
from support.policies import tiny_policy

pytest.importorskip("vllm")
pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(900)]

ROOM = """
from headrace.rollout.environments.base import StepResult


class Room:
    def reset(self, prompt, **row):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return StepResult(f" room {self.turns}: ", float(len(completion) % 2), self.turns == 3)
"""
VLLM = {"rollout.engine": "vllm", "generator.kv_gb": 0.02}


@pytest.fixture
def vllm_job(tmp_path: Path, job: MakeJob) -> Job:
    """A run of a small policy whose heads are large enough for vLLM."""
    run = job(**VLLM)
    tiny_policy(tmp_path, "llama", head_dim=32)
    return run


def test_the_quickstarts_policy_learns_though_a_rollout_is_killed(tmp_path: Path, job: MakeJob, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = job().quickstart("rollout.engine=vllm", "run.steps=60")
    run.wait_for_step(6)
    os.kill(child_of(run, "rollout-1"), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert_account_adds_up(run)
    summary = run.summary()
    assert summary["status"] == "finished" and "rollout-1 was ended by SIGKILL and is started again" in output
    lines = run.metrics()
    rewards = [line["reward/mean"] for line in lines]
    assert mean(rewards[-8:]) > mean(rewards[:4]) + 0.15, rewards
    fresh = [line["mismatch/logprob_abs_diff"] for line in lines if line["staleness/max"] == 0]
    assert fresh and max(fresh) < 1e-4
    assert len(summary["staleness"]) > 1, "versions came out while it generated"


@pytest.mark.parametrize("rank", [0, 2])
def test_in_a_run_without_staleness_the_ratio_is_one(vllm_job: Job, rank: int):
    """Under filters and a penalty, with whole weights and with an adapter, which the rollout merges."""
    vllm_job.run(**{
        "sampling.temperature": 0.7, "sampling.top_p": 0.7, "sampling.min_p": 0.05, "sampling.repetition_penalty": 1.3,
        "run.schedule": "sync", "run.steps": 3, "roles.rollout": 1, "lora.rank": rank,
    })  # fmt: skip
    for step in vllm_job.metrics():
        assert step["staleness/max"] == step["actor/pg_clipfrac"] == 0
        assert abs(step["is/mean"] - 1) < 1e-5 and step["is/max"] < 1.0002
        assert step["mismatch/logprob_abs_diff"] < 2e-5


def test_turns_go_on_in_vllm_after_what_an_environment_answers(vllm_job: Job):
    (vllm_job.folder / "rooms.py").write_text(ROOM)
    vllm_job.run(**{
        "environment.path": f"{vllm_job.folder / 'rooms.py'}:Room", "environment.max_turns": 4, "sampling.stop": "[a, e]",
        "sampling.max_new_tokens": 80, "run.schedule": "sync", "run.steps": 3, "roles.rollout": 1,
    })  # fmt: skip
    assert_account_adds_up(vllm_job)
    assert max(step["turns/mean"] for step in vllm_job.metrics()) > 1.5
    for step in vllm_job.metrics():
        assert step["staleness/max"] == step["actor/pg_clipfrac"] == 0
        assert step["mismatch/logprob_abs_diff"] < 2e-5


def test_trajectories_of_a_dead_rollout_go_on_in_another(vllm_job: Job):
    """Under the present weights, as the schedule `partial` allows."""
    run = vllm_job.start(**{
        "run.schedule": "partial", "run.steps": 6, "batch.samples_per_prompt": 8, "sampling.max_new_tokens": 200,
        "rollout.stream_tokens": 8, "repack.period_s": 0,
    })  # fmt: skip
    run.wait_for_step(2)
    os.kill(child_of(run, "rollout-1"), signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output + run.logs()
    summary = run.summary()
    assert summary["continued"] > 0 and summary["tokens_kept"] > 0
    assert_account_adds_up(run)


def test_two_ranks_of_a_replica_are_workers_of_vllm(vllm_job: Job):
    vllm_job.run(**{
        "rollout.tp": 2, "roles.rollout": 2, "run.schedule": "sync", "run.steps": 3, "sampling.temperature": 0.7,
        "sampling.top_p": 0.8,
    })  # fmt: skip
    assert_account_adds_up(vllm_job)
    for step in vllm_job.metrics():
        assert step["staleness/max"] == step["actor/pg_clipfrac"] == 0
        assert step["mismatch/logprob_abs_diff"] < 2e-5
