"""A trajectory in a rollout: the report of its end to the hub."""

import math

import pytest

from headrace.comm.messages import GroupId, RowDone
from headrace.rollout.leased_row import LeasedRow


@pytest.mark.parametrize("reward", [math.nan, -math.inf, 1e39])
def test_a_reward_that_no_row_and_no_journal_takes_fails_its_trajectory(reward: float):
    """It may come from a generator of the user's, or be the sum of an environment's steps."""
    row = LeasedRow(GroupId(0, 5).row(0), attempt=1, version=3, row={})
    row.set_reward(reward)
    report = row.report(["unit"])
    assert isinstance(report, RowDone)
    assert (report.reward, report.failure) == (None, f"the reward is {reward}")
