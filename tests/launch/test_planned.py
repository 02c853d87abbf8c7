"""The prediction of a plan stands beside what the run measured, in its summary and in the table at its end."""

import errno
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.config.run_folder import read_summary
from headrace.launch.report.planned import (
    PREDICTION_FILE,
    Prediction,
    job_digest,
    measured_steps,
    plan_folder,
    planned_text,
    settles,
    with_prediction,
)

SETTINGS = {"run.schedule": "headrace", "roles.rollout": 3, "generator.max_running": 64}
WORDS = {"roles.rollout": 3, "generator.max_running": 64}
JOB = job_digest(read_recipe(None, [f"{key}={value}" for key, value in WORDS.items()]), SETTINGS)
PREDICTION = Prediction(SETTINGS, tokens_per_s=900.0, step_s=2.5, staleness=1.5, steps=(10, 20), job=JOB)


def finished_run(folder: Path, **settings: object) -> Path:
    """A run of 12 steps: the first 5 and the last 2 are slower than the others."""
    run = folder / "run"
    run.mkdir()
    words = {"run.dir": run} | WORDS | settings
    save_recipe(read_recipe(None, [f"{key}={value}" for key, value in words.items()]))
    steps = [
        {"perf/throughput": 1000.0 if inside else 100.0, "timing_s/step": 2.0, "staleness/mean": 1.0 if inside else 9.0}
        for inside in (5 <= number < 10 for number in range(12))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run / "summary.json").write_text(json.dumps({"status": "finished"}))
    return run


def plan_of(run: Path, prediction: Prediction = PREDICTION) -> None:
    plan_folder(run).mkdir()
    (plan_folder(run) / PREDICTION_FILE).write_bytes(msgspec.json.encode(prediction))


def test_a_run_with_the_planned_settings_has_the_prediction_beside_its_measured_part(tmp_path: Path):
    run = finished_run(tmp_path)
    plan_of(run)
    summary = with_prediction(run, {"status": "finished"})
    expected = {
        "steps": [5, 10],
        "predicted_steps": [10, 20],
        "predicted": {"tokens_per_s": 900.0, "step_s": 2.5, "staleness": 1.5},
        "measured": {"tokens_per_s": 1000.0, "step_s": 2.0, "staleness": 1.0},
    }
    assert summary == {"status": "finished", "planned": expected} == read_summary(run)
    assert planned_text(summary) == (
        "900 tokens/s predicted from steps 11 to 20 of a simulated run, 1,000 measured in steps 6 to 10 (0.90 times)"
    )


def test_the_measured_part_is_the_one_that_the_plan_has_measured(tmp_path: Path):
    run = finished_run(tmp_path)
    planned = with_prediction(run, {}, PREDICTION, (7, 12))["planned"]
    assert planned["steps"] == [7, 12] and planned["measured"]["tokens_per_s"] == pytest.approx(640.0)


def test_a_summary_that_cannot_be_written_is_shown_with_its_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    run = finished_run(tmp_path)
    plan_of(run)
    monkeypatch.setattr("headrace.launch.report.planned.write_durably", fail)
    assert "planned" in with_prediction(run, {})


def test_a_run_without_a_plan_reads_no_metrics(tmp_path: Path):
    run = finished_run(tmp_path)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert with_prediction(run, {}) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"roles.rollout": 4},
        {"run.schedule": "partial"},
        {"generator.max_running": 32},
        {"sampling.max_new_tokens": 77},
        {"data.path": "other.jsonl"},
    ],
)
def test_a_run_with_other_settings_has_no_prediction(tmp_path: Path, settings: dict[str, Any]):
    run = finished_run(tmp_path, **settings)
    plan_of(run)
    assert with_prediction(run, {"status": "finished"}) == {"status": "finished"} == read_summary(run)
    assert planned_text({"status": "finished"}) == ""


def test_without_a_plan_or_with_a_broken_one_the_summary_stays_as_it_is(tmp_path: Path):
    run = finished_run(tmp_path)
    assert with_prediction(run, {"status": "finished"}) == {"status": "finished"}
    plan_of(run)
    (plan_folder(run) / PREDICTION_FILE).write_text("{")
    assert with_prediction(run, {"status": "finished"}) == {"status": "finished"}


def test_a_run_settles_if_twice_its_staleness_is_over_before_and_its_staleness_left_after_the_measured_part():
    assert measured_steps(24) == (10, 20) and measured_steps(8, begun=2) == (5, 6)
    assert settles(4.0, 24) and not settles(4.1, 24), "4 steps are left"
    assert settles(6.0, 36) and not settles(8.0, 36)
