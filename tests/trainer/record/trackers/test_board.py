"""TensorBoard's own code reads what the run writes for it."""

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.util import tensor_util

from headrace.trainer.record.trackers.board import LAYOUT, Board
from headrace.trainer.record.trackers.tracker import Histogram

CONFIG = {"run.steps": 2, "reward.path": "a.py:b"}
CHANGED = {"run.steps": 2, "reward.path": "a.py:b", "generator.exact": True, "data.weights": [1.0, 2.0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a run of two steps."""
    (tmp_path / "mine").mkdir()
    board = Board(tmp_path / "mine/tensorboard", 0, deadline_s=60)
    board.begin(CONFIG, CHANGED)
    board.evaluation(0, {"eval/version": 0.0, "eval/a/avg@1": 0.25})
    for step in range(2):
        values = {"reward/mean": 0.5 + step, "eval/a/avg@1": 0.25}
        board.step(step, values, {"reward": Histogram([0.0, 0.5, 1.0], [3.0, 1.0 + step])})
    board.text(1, "samples", "1 <b>\n2")
    board.end({"reward_first": 0.5, "reward_last": 1.5})
    return tmp_path


def of_plugins(folder: Path) -> TBContext:
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    return TBContext(logdir=str(folder), multiplexer=multiplexer, data_provider=provider)


def test_numbers_evaluations_and_texts_are_at_their_steps(folder: Path):
    events = EventAccumulator(str(folder / "mine/tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.5), (1, 1.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/a/avg@1")] == [(0, 0.25)]
    (text,) = events.Tensors("samples")
    assert (text.step, text.tensor_proto.string_val[0]) == (1, b"    1 <b>\n    2")
    (config,) = events.Tensors("config")
    assert config.tensor_proto.string_val[0] == b"    run.steps: 2\n    reward.path: a.py:b"


def test_a_histogram_has_its_edges_and_counts(folder: Path):
    events = EventAccumulator(str(folder / "mine/tensorboard")).Reload()
    found = [tensor_util.make_ndarray(event.tensor_proto) for event in events.Tensors("reward")]
    assert found[1].tolist() == [[0.0, 0.5, 3.0], [0.5, 1.0, 2.0]]
    assert events.SummaryMetadata("reward").plugin_data.plugin_name == "histograms"


def test_the_page_of_custom_scalars_has_the_groups_of_charts(folder: Path):
    text: Any = CustomScalarsPlugin(of_plugins(folder)).layout_impl(context.RequestContext(), "")
    layout = json.loads(text)
    assert [group["title"] for group in layout["category"]] == ["learning", "health", "speed"]
    charts = {chart["title"]: chart["multiline"]["tag"] for group in layout["category"] for chart in group["chart"]}
    assert charts == {title: [*tags] for group in LAYOUT.values() for title, tags in group.items()}


def test_the_page_of_hyperparameters_has_the_changed_settings_and_the_final_reward(folder: Path):
    tensorboard = backend_context.Context(of_plugins(folder))
    metadata = tensorboard.hparams_metadata(context.RequestContext(), "")
    experiment = tensorboard.experiment_from_metadata(context.RequestContext(), "", True, metadata, [])
    assert {info.name for info in experiment.hparam_infos} == {*CHANGED}
    assert {info.name.tag for info in experiment.metric_infos} == {"reward_first", "reward_last"}
    api: Any = api_pb2  # generated, which type checkers do not see
    wanted = api.ListSessionGroupsRequest(
        allowed_statuses=[api.STATUS_SUCCESS, api.STATUS_UNKNOWN],
        col_params=[{"metric": {"tag": "reward_last"}}],
        slice_size=10,
    )
    handler = list_session_groups.Handler(context.RequestContext(), tensorboard, "", wanted)
    (group,) = handler.run().session_groups
    (session,) = group.sessions
    assert group.hparams["run.steps"].number_value == 2 and group.hparams["generator.exact"].bool_value
    assert group.hparams["reward.path"].string_value == "a.py:b"
    assert {value.name.tag: value.value for value in session.metric_values}["reward_last"] == 1.5


def test_a_resumed_run_replaces_the_steps_that_it_trains_again(folder: Path):
    again = Board(folder / "mine/tensorboard", 1, deadline_s=60)
    again.begin(CONFIG, CHANGED)
    again.step(1, {"reward/mean": 9.0}, {})
    again.end({"reward_last": 9.0})
    events = EventAccumulator(str(folder / "mine/tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.5), (1, 9.0)]


@pytest.mark.parametrize("version", [2, 4])
def test_an_evaluation_that_comes_again_after_a_crash_is_shown_once(tmp_path: Path, version: int):
    """Its version may be some steps before the one that was in training."""
    for _ in range(2):
        board = Board(tmp_path, 5, deadline_s=60)
        board.evaluation(version, {"eval/version": float(version), "eval/a/avg@1": 0.25})
        board.end(None)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/a/avg@1")] == [(version, 0.25)]


def test_an_image_is_shown_with_its_size(tmp_path: Path):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 3, 2, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0\0\0\0" * 2)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    board = Board(tmp_path, 0, deadline_s=60)
    board.image(4, "timeline", png, (3, 2))
    board.end(None)
    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("timeline")
    assert (event.step, *event.tensor_proto.string_val) == (4, b"3", b"2", png)


def test_numbers_that_are_not_finite_are_written(tmp_path: Path):
    board = Board(tmp_path, 0, deadline_s=60)
    board.step(0, {"reward/mean": math.nan, "actor/grad_norm": math.inf}, {})
    board.end(None)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert np.isnan(events.Scalars("reward/mean")[0].value) and events.Scalars("actor/grad_norm")[0].value == math.inf
