"""A whole run shows its metrics in TensorBoard and in a tracker: what `metrics.jsonl` has, each step once."""

import json
import re
from pathlib import Path

import pytest
from support.fake_wandb import FakeWandb
from support.system import System
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from headrace.trainer.record.trackers.board import LAYOUT

RARE = ("^eval/.*@", "^alarm/", "^rollout/tok_per_s$")
"""Charts of what a short run without evaluations lacks; it may end before the rollouts have reported twice."""


def test_tensorboard_and_a_tracker_have_the_numbers_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb(tmp_path, monkeypatch)
    system = System(tmp_path, **{"run.report_to": "[tensorboard,wandb]", "run.schedule": "one_step"}).start_all()
    system.wait()
    lines = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(system.dir / "tensorboard")).Reload()
    shown = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert {*shown} == {name for line in lines for name in line} - {"step", "time_s", "staleness/hist"}
    sent = {call["step"]: call["values"] for call in wandb.calls("log") if "samples" not in call["values"]}
    for line in lines:
        numbers = {name: line[name] for name in shown if name in line}
        assert {name: shown[name][line["step"] + 1] for name in numbers} == pytest.approx(
            numbers, rel=1e-6, nan_ok=True
        )
        histograms = {"reward", "staleness", "is/log_ratio", "response_length"}
        assert {name: value for name, value in sent[line["step"] + 1].items() if name not in histograms} == numbers
        found = {event.step: tensor_util.make_ndarray(event.tensor_proto) for event in events.Tensors("staleness")}[
            line["step"] + 1
        ]
        assert {str(age): int(row[2]) for age, row in enumerate(found) if row[2]} == line["staleness/hist"]
    for patterns in (patterns for charts in LAYOUT.values() for patterns in charts.values()):
        for pattern in patterns:
            assert pattern in RARE or any(re.match(pattern, name) for name in shown), pattern
    assert [call["exit_code"] for call in wandb.calls("finish")] == [0]
