"""A run whose learning is about to collapse says so in every place for alarms, and ends there where that is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.system import System

from headrace.comm.messages import StatusReport, StatusRequested
from headrace.launch.status.picture import describe

CAUSE = "optimizer.lr=3 is too high; try a tenth"


def system_of(folder: Path, **settings: object) -> System:
    """At this rate the first update changes the policy beyond recognition."""
    words = {"optimizer.lr": 3, "checkpoint.every": 1, "batch.samples_per_prompt": 4}
    return System(folder, **(words | settings))


def metrics_of(system: System) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]


def test_an_alarm_is_on_the_console_in_the_metrics_the_summary_and_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    system = system_of(tmp_path, **{"run.steps": 10_000}).start_all()
    inbox = system.network.mailboxes.open("ctl")
    told: list[str] = []

    def is_told() -> bool:
        inbox.send("hub", StatusRequested("ctl"))
        envelope = inbox.receive(1.0)
        if envelope is not None and isinstance(envelope.message, StatusReport):
            told[:] = describe(envelope.message)
        return any(CAUSE in line for line in told)

    system.until(is_told)
    inbox.close()
    system.interrupt()
    summary = system.wait()
    assert [line for line in told if line.startswith("last alarm, after step ") and line.endswith(CAUSE)]
    assert summary["status"] == "interrupted" and summary["alarm"].endswith(CAUSE)
    alarmed = [row["step"] for row in metrics_of(system) if row.get("alarm/learning_rate") == 1.0]
    assert summary["steps"] > alarmed[0] > 0, "the run went on"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alarm: ")]
    assert lines[0].endswith(CAUSE)


def test_a_run_that_is_about_to_collapse_ends_with_its_cause_and_keeps_the_last_checkpoint(tmp_path: Path):
    system = system_of(tmp_path, **{"run.steps": 10_000, "run.on_collapse": "stop"}).start_all()
    summary = system.wait()
    rows = metrics_of(system)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert CAUSE in summary["error"] and f"its last checkpoint is that of step {len(rows) - 1}" in summary["error"]
    assert [row["step"] for row in rows if "alarm/learning_rate" in row] == [rows[-1]["step"]]
    checkpoints = sorted(int(path.name.removeprefix("step_")) for path in (system.dir / "checkpoints").glob("step_*"))
    assert checkpoints[-1] == summary["steps"] - 1 == len(rows) - 1, "none of the weights after the alarm"
    assert summary["export"] == "" and summary["accounting"]["holds"] is True


def test_a_run_without_a_fault_has_no_alarm_and_does_not_stop(tmp_path: Path):
    system = system_of(tmp_path, **{"optimizer.lr": 1e-4, "run.steps": 20, "run.on_collapse": "stop"}).start_all()
    summary = system.wait()
    assert (summary["status"], summary["steps"]) == ("finished", 20) and "alarm" not in summary
    alarms = {name for row in metrics_of(system) for name in row if name.startswith("alarm/")}
    assert alarms <= {"alarm/cut_responses"}, "responses of this run have six tokens"
