"""The packages of the trackers store what `metrics.jsonl` has, without a network."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.comm.recipe import Recipe, RunSettings
from headrace.trainer.record.trackers import opened
from headrace.trainer.record.trackers.opened import open_trackers
from headrace.trainer.record.trackers.packages import mlflow_name
from headrace.trainer.record.trackers.settings import shown_settings
from headrace.trainer.record.trackers.tracker import Histogram

pytestmark = pytest.mark.extra
HISTOGRAM = Histogram([0.0, 0.5, 1.0], [3.0, 1.0])
_BLOCK = 1 << 15
"""Bytes of a block of wandb's file, which is a log of LevelDB with a head of 7 bytes."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch):
    """The machine may be busy: the import of a package alone takes seconds."""
    monkeypatch.setattr(opened, "END_S", 300.0)


def metrics_of(step: int) -> dict[str, Any]:
    values = {"reward/mean": 0.1 * step, "kl/age/9+": 1e-7, "actor/lr": 1e-6, "perf/throughput": 1234.5}
    return values | ({"eval/version": 2.0, "eval/a/avg@1": 0.25} if step == 3 else {})


def run_twice(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """A run of 4 steps, and of 6 after it was resumed; returns the lines of its metrics."""
    run_dir.mkdir()
    path = run_dir / "metrics.jsonl"
    for first, last in ((0, 4), (4, 6)):
        run = RunSettings(dir=str(run_dir), steps=last, report_to=(name,))  # type: ignore[arg-type]
        trackers = open_trackers(Recipe(run=run), first, path)
        for step in range(first, last):
            with path.open("a") as file:
                file.write(json.dumps({"step": step, "time_s": 1.0, **metrics_of(step)}) + "\n")
            trackers.step(step + 1, metrics_of(step), {"reward": HISTOGRAM})
        trackers.text(last, "samples", "2 < 3")
        trackers.end({"reward_last": 0.5})
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The points of each metric of `metrics.jsonl`."""
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "time_s"))
    return {name: [(line["step"] + 1, line[name]) for line in lines if name in line] for name in names}


def wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    data = path.read_bytes()
    place = 7
    record = b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:
            place += _BLOCK - place % _BLOCK
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(record)
            record = b""


def test_wandb_stores_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    lines = run_twice(tmp_path / "sums", "wandb")
    files = sorted((tmp_path / "sums/trackers/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1, "one run with two parts"
    found: dict[str, list[tuple[int, float]]] = {}
    histograms: list[Any] = []
    config: dict[str, Any] = {}
    for record in (record for path in files for record in wandb_records(path)):
        for update in record.run.config.update:
            config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
        if record.HasField("run"):
            assert (record.run.project, record.run.display_name) == ("headrace", "sums")
        items = {(item.key, *item.nested_key): json.loads(item.value_json) for item in record.history.item}
        values = {"".join(key): value for key, value in items.items() if len([*filter(None, key)]) == 1}
        for name, value in values.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((values["_step"], value))
        histograms += [value for key, value in items.items() if key[1:] == ("reward", "values")]
    assert found == scalars(lines)
    assert histograms == [[3.0, 1.0]] * 6
    assert config["run.steps"] == 6 and config["algorithm.loss"] == Recipe().algorithm.loss
    assert len([*(tmp_path / "sums/trackers/wandb").glob("offline-run-*/files/media/html/samples_*")]) == 2


def test_trackio_stores_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    lines = run_twice(tmp_path / "sums", "trackio")
    database = sqlite3.connect(tmp_path / "trackio/headrace.db")
    rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    configs = database.execute("select config from configs").fetchall()
    database.close()
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("sums-")
    found: dict[str, list[tuple[int, float]]] = {}
    others: list[Any] = []
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append((step, value))
            else:
                others.append((name, value))
    assert found.pop("reward_last") == [(4, 0.5), (6, 0.5)]
    assert found == scalars(lines)
    assert [name for name, _ in others].count("reward") == 6
    assert [value["_value"] for name, value in others if name == "samples"] == ["    2 < 3"] * 2
    assert json.loads(configs[-1][0])["algorithm.loss"] == Recipe().algorithm.loss


def test_mlflow_stores_a_run_that_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    lines = run_twice(tmp_path / "sums", "mlflow")
    from mlflow import MlflowClient  # type: ignore[import-not-found]

    client: Any = MlflowClient()
    experiment = client.get_experiment_by_name("headrace")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("sums", "FINISHED")
    for name, points in scalars(lines).items():
        history = client.get_metric_history(run.info.run_id, mlflow_name(name))
        assert sorted((point.step, point.value) for point in history) == points
    assert run.data.params["algorithm.loss"] == Recipe().algorithm.loss and len(run.data.params) > 120
    artifacts = tmp_path.rglob("artifacts")
    (folder,) = artifacts
    again = Recipe(run=RunSettings(dir=str(tmp_path / "sums"), steps=6, report_to=("mlflow",)))
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(shown_settings(again)))
    assert (folder / "samples/step_6.txt").read_text() == "2 < 3"
