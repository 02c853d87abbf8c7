"""A trajectory in a rollout: the report of its end to the hub."""

import json
import math

import pytest

from headrace.comm.messages import GroupId, RowDone
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.environments.base import Episode
from headrace.rollout.leased_row import LeasedRow


@pytest.mark.parametrize("reward", [math.nan, -math.inf, 1e39])
def test_a_reward_that_no_row_and_no_journal_takes_fails_its_trajectory(reward: float):
    """It may come from a generator of the user's, or be the sum of an environment's steps."""
    row = LeasedRow(GroupId(0, 5).row(0), attempt=1, version=3, row={})
    row.set_reward(reward)
    report = row.report(["unit"])
    assert isinstance(report, RowDone)
    assert (report.reward, report.failure) == (None, f"the reward is {reward}")


@pytest.mark.parametrize(
    ("episode", "is_own", "expected"),
    [(None, False, 3), (Episode("2 + 2"), False, 3), (Episode("2 + 2 in room 7"), False, 0), (None, True, 0)],
)
def test_only_the_prompt_of_the_data_is_reported_as_shared_by_the_group(
    episode: Episode | None, is_own: bool, expected: int
):
    """Micro-batches are planned by this number: if a sample lacked these tokens, its micro-batch would need more memory than planned."""
    done = Completion(0, [5, 6, 7], [8, 9], [-1.0, -1.0], "stop")
    row = LeasedRow(GroupId(0, 5).row(0), 1, 3, {"prompt": "2 + 2"}, done, episode=episode, has_own_prompt=is_own)
    row.set_reward(1.0)
    report = row.report(["unit"])
    assert isinstance(report, RowDone)
    assert (report.num_tokens, report.num_prompt_tokens) == (5, expected)


def test_a_row_has_the_digests_of_the_versions_that_drew_its_tokens():
    """Those of the first tokens come from the rollout that drew them."""
    done = Completion(1, [5, 6], [7, 8, 9], [-0.5] * 3, finish_reason="stop")
    row = LeasedRow(GroupId(0, 5).row(0), 1, 4, {}, done, digests={4: "d4", 3: "d3", 9: "d9"}, reward=1.0)
    row.keep(2, [3, 4], {3: "d3", 4: "e4"})
    columns = row.columns()
    assert columns["versions"].tolist() == [3, 4, 4]
    assert json.loads(columns["weight_digests"].tobytes()) == {"3": "d3", "4": ""}, "two weights had the number 4"
