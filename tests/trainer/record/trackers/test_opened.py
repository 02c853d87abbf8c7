"""Which trackers a run has."""

import json
from pathlib import Path

import pytest
from support.fake_wandb import FakeWandb

from headrace.comm.recipe import Recipe, RunSettings
from headrace.trainer.record.trackers.opened import open_trackers


@pytest.mark.parametrize("names", [(), ("tensorboard",), ("wandb",), ("tensorboard", "wandb", "wandb")])
def test_a_run_reports_to_the_trackers_that_its_recipe_names(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wandb = FakeWandb(tmp_path, monkeypatch)
    metrics = wandb.run_dir / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 0, "time_s": 1.0, "reward/mean": 0.5}) + "\n")
    run = RunSettings(dir=str(wandb.run_dir), report_to=names)  # type: ignore[arg-type]
    trackers = open_trackers(Recipe(run=run), 1, metrics)
    trackers.step(2, {"reward/mean": 0.75}, {})
    trackers.end({"reward_last": 0.75})
    assert (wandb.run_dir / "tensorboard").exists() == ("tensorboard" in names)
    assert wandb.steps == ([1, 2] if "wandb" in names else []), "the tracker has the step before, too"
    assert [call["config"]["run.report_to"] for call in wandb.calls("init")] == [[*names]] * ("wandb" in names)
