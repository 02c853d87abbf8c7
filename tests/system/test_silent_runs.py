"""Runs that can never train a step end with an exit code and their cause on one line, in the time that a few batches take."""

import pytest
from support.job import MakeJob, assert_account_adds_up

NO_RETURN = "def reward(solution_str):\n    score = float(len(solution_str))\n"
EQUAL = "def reward(solution_str):\n    return 0.0\n"
JUDGE_DOWN = """
import os

def reward(solution_str):
    with open(__file__ + ".calls", "a") as calls:
        calls.write("x")
    if os.path.getsize(__file__ + ".calls") > 150:
        raise ConnectionError("the judge is down")
    return float(len(solution_str))
"""


def ends_with(job: MakeJob, source: str, exit_code: int, cause: str, **settings: object) -> None:
    run = job(run__steps=1_000_000, **settings)
    (run.folder / "silent.py").write_text(source)
    code, output = run.start(**{"reward.path": f"{run.folder / 'silent.py'}:reward"}).end()
    assert code == exit_code, output + run.logs()
    assert any(cause in line for line in output.splitlines()), output
    assert cause in run.summary()["error"] and run.summary()["status"] == "failed"
    assert_account_adds_up(run)


@pytest.mark.slow
def test_a_reward_that_always_returns_none_ends_the_run_with_its_cause(job: MakeJob):
    ends_with(job, NO_RETURN, 2, "samples; is a `return` missing?")


@pytest.mark.slow
def test_filtered_groups_of_equal_rewards_end_the_run_with_their_cause(job: MakeJob):
    cause = "were filtered out (all rewards of a group are equal); queue.max_lost_batches allows more"
    ends_with(job, EQUAL, 1, cause, queue__filter_zero_std=True)


@pytest.mark.slow
def test_a_reward_that_worked_and_then_always_raises_ends_the_run_with_its_cause(job: MakeJob):
    ends_with(job, JUDGE_DOWN, 1, "trajectories failed (ConnectionError: the judge is down")
