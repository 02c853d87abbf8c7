"""A run that learns nothing says so in every place for warnings, once, also after its trainer was started again and it was resumed."""

import json
from pathlib import Path

import pytest
from support.system import System

from headrace.launch.report.summary import summary_rows
from headrace.trainer.alarms.watch import STEPS

TEXT = (
    "nothing is learnt: in each of the last 5 steps the rewards within at least 95% of the groups are equal, namely 0.5"
)


def system_of(folder: Path, **settings: object) -> System:
    system = System(
        folder, **({"run.steps": STEPS + 2, "checkpoint.every": 1, "batch.prompts_per_step": 12} | settings)
    )
    (folder / "rewards.py").write_text("def reward(completions, **rest):\n    return [0.5 for _ in completions]\n")
    return system


def test_a_constant_reward_is_told_once_on_the_console_in_the_metrics_and_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first = system_of(tmp_path).start_all().wait()
    resumed = system_of(tmp_path, **{"run.steps": STEPS + 5, "run.resume": "auto"}).start_all()
    summary = resumed.wait()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(told) == 2 and told[0].startswith(f"warning: {TEXT}") and "were cut at the maximum length" in told[1]
    assert summary["steps"] == STEPS + 5 and summary["status"] == "finished"
    assert (
        summary["warnings"]
        == first["warnings"]
        == [f"at step {STEPS}: {line.removeprefix('warning: ')}" for line in told]
    )
    assert TEXT in dict(summary_rows(summary, tmp_path))["warnings"] and "alarm" not in summary
    rows = map(json.loads, (resumed.dir / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if row.get("alarm/equal_rewards")] == [*range(STEPS - 1, STEPS + 5)]
