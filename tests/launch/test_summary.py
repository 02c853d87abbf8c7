"""The table at the end of a run says what its figures are of."""

import pytest

from headrace.launch.report.summary import summary_rows

ACCOUNT = {"leased": 0, "holds": True}


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (2, "0.300  (mean of the steps)"),
        (5, "0.100 -> 0.300  (first and last 3 steps)"),
        (29, "0.100 -> 0.300  (first and last 3 steps)"),
        (30, "0.100 -> 0.300  (first and last tenth)"),
    ],
)
def test_the_reward_is_said_to_be_of_the_steps_that_it_is_the_mean_of(steps: int, text: str):
    rows = dict(summary_rows({"accounting": ACCOUNT, "steps": steps, "reward_first": 0.1, "reward_last": 0.3}))
    assert rows["reward"] == text
