"""The table at the end of a run begins with what was learnt, and says what its figures are of."""

from pathlib import Path
from typing import Any

import pytest

from headrace.launch.report.summary import show_summary, summary_rows

ACCOUNT: dict[str, Any] = {"leased": 0, "holds": True}
FULL: dict[str, Any] = {
    "status": "finished",
    "steps": 60,
    "accounting": ACCOUNT,
    "reward_first": 0.1,
    "reward_last": 0.3,
    "evaluations": [
        {"eval/version": step, **{f"eval/{name}/avg@1": value for name in ("sums", "words", "more", "most")}}
        for step, value in ((0, 0.2), (40, 0.6), (60, 0.5))
    ],
    "time_s": 3725.4,
    "tokens_per_s": 1234.5,
    "export": "my runs/a/hf",
    "failures": {"no answer": 2},
    "advice": "more rollouts",
    "staleness": {"0": 1},
    "versions_per_trajectory": {"1": 1},
}


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
    facts = {"accounting": ACCOUNT, "steps": steps, "reward_first": 0.1, "reward_last": 0.3}
    assert dict(summary_rows(facts, Path("run")))["reward"] == text


def test_what_people_look_for_comes_first_and_the_whole_table_fits_on_a_screen():
    rows = summary_rows(FULL, Path("my runs/a"), "actor-0 1 GB")
    assert [name for name, _ in rows[:7]] == [
        "reward", "eval/sums/avg@1", "eval/words/avg@1", "more held-out files", "model", "use it", "time",
    ]  # fmt: skip
    texts = dict(rows)
    assert texts["eval/sums/avg@1"] == "first 0.200 (step 0) -> best 0.600 (step 40) -> last 0.500 (step 60)"
    assert texts["use it"] == 'transformers.pipeline("text-generation", "my runs/a/hf")'
    assert texts["time"] == "1 h 2 min, 1,234 tokens/s"
    assert texts["run"] == "finished after 60 steps, in my runs/a"
    assert len(rows) < 15


def test_the_account_tells_how_many_trajectories_have_two_versions_and_why():
    summary = {"accounting": ACCOUNT, "versions_per_trajectory": {"1": 3, "2": 1}}
    assert dict(summary_rows(summary, Path("run")))["versions per trajectory"] == "1: 75.0 %, 2: 25.0 %"
    midway = {"starved": 2, "age": 1}
    assert dict(summary_rows(summary | {"midway": midway}, Path("run")))["versions per trajectory"] == (
        "1: 75.0 %, 2: 25.0 % (new weights midway: 2 x the trainer starved, 1 x the old ones were too old)"
    )


def test_the_best_evaluation_is_named_once_if_it_is_the_last_one():
    results = FULL["evaluations"][:2]
    rows = dict(summary_rows({**FULL, "evaluations": results}, Path("run")))
    assert rows["eval/sums/avg@1"] == "first 0.200 (step 0) -> best 0.600 (step 40)"
    rows = dict(summary_rows({**FULL, "evaluations": results[:1]}, Path("run")))
    assert rows["eval/sums/avg@1"] == "0.200 (step 0)"


def test_a_run_without_a_model_shows_no_way_to_use_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    show_summary({"status": "finished", "steps": 0, "accounting": ACCOUNT, "time_s": 61}, tmp_path)
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows.keys() == {"time", "run", "accounting"} and "1 min 1 s" in rows["time"]
