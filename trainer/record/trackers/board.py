"""The run as files of TensorBoard's events.

TensorBoard's own writer has a thread, which ends when the disk is full and takes the process with it. Here each step is one
record, which the trainer's loop writes and waits for.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from ....comm.disk import AppendFile, make_folders, when_writable
from .earlier_points import has_point
from .tracker import Histogram

_Event: Any = getattr(event_pb2, "Event")  # noqa: B009 - generated classes, which type checkers do not see
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009
_SummaryMetadata: Any = getattr(summary_pb2, "SummaryMetadata")  # noqa: B009
_TensorProto: Any = getattr(tensor_pb2, "TensorProto")  # noqa: B009
_TensorShape: Any = getattr(tensor_shape_pb2, "TensorShapeProto")  # noqa: B009
_Layout: Any = layout_pb2
_HParams: Any = plugin_data_pb2
_STRING: Any = getattr(types_pb2, "DT_STRING")  # noqa: B009
_DOUBLE: Any = getattr(types_pb2, "DT_DOUBLE")  # noqa: B009

FOLDER = "tensorboard"
"""Folder of the run folder."""
HPARAMS = "hparams"
"""Folder within it: a run of its own, since TensorBoard lists every number beside the settings as their result."""
LAYOUT: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "learning": {
        "reward": ("^reward/(mean|min|max)$",),
        "evaluation": ("^eval/.*@",),
        "response length": ("^response_length/(mean|max)$",),
        "cut responses and groups without signal": ("^response_length/clip_ratio$", "^group/zero_std_frac$"),
        "entropy": ("^actor/entropy$",),
        "distance from the generating policy": ("^actor/ppo_kl$",),
        "gradient norm": ("^actor/grad_norm$",),
    },
    "health": {
        "mismatch of generator and trainer": ("^mismatch/(logprob_abs_diff|probs_diff_mean)$",),
        "staleness": ("^staleness/(mean|max|token_mean)$",),
        "clipped tokens": ("^actor/pg_clipfrac$",),
        "effective sample size": ("^is/ess$",),
        "divergence by age": ("^kl/age/",),
        "divergence by depth": ("^kl/depth/",),
        "left out": ("^actor/(skipped_updates|non_finite_tokens)$", "^alarm/"),
    },
    "speed": {
        "tokens per second": ("^perf/throughput$", "^rollout/tok_per_s$"),
        "seconds of a step": ("^timing_s/",),
        "idle": ("^idle/",),
        "groups in the queue": ("^queue/(window|ready|leased)$",),
    },
}
"""The charts of each group on TensorBoard's page *Custom Scalars*, with patterns of the names of their metrics."""


class Board:
    """A new file of events in `folder`; TensorBoard forgets earlier files' steps from `first_step` on. Steps count from 1 here."""

    def __init__(self, folder: Path, first_step: int, deadline_s: float) -> None:
        """deadline_s: bounds the wait for room on a full disk."""
        self._folder = folder
        self._deadline_s = deadline_s
        self._first_step = first_step
        self._has_step = False
        """Whether this process has shown a step."""
        self._file = _new_file(folder, deadline_s)
        self._append(_Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = _SessionLog(status=_SessionLog.START)
        self._append(_Event(wall_time=time.time(), step=first_step, session_log=start))

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """The settings as text, the layout of the charts, and the settings that differ from the defaults as hyperparameters."""
        self.text(self._first_step, "config", "\n".join(f"{name}: {value}" for name, value in config.items()))
        layout = _Layout.Layout(
            category=[
                _Layout.Category(
                    title=group,
                    chart=[
                        _Layout.Chart(title=title, multiline=_Layout.MultilineChartContent(tag=patterns))
                        for title, patterns in charts.items()
                    ],
                )
                for group, charts in LAYOUT.items()
            ]
        )
        tensor = _TensorProto(dtype=_STRING, string_val=[layout.SerializeToString()])
        kind = layout_metadata.create_summary_metadata()
        value = _Summary.Value(tag=layout_metadata.CONFIG_SUMMARY_TAG, metadata=kind, tensor=tensor)
        self._append_values(self._first_step, [value])
        self._begin_hparams(changed)

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        self._has_step = True
        values = [
            _Summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
            if not name.startswith("eval/")  # `evaluation` has shown them at their version
        ]
        self._append_values(step, values + [_histogram(name, found) for name, found in histograms.items()])

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        """An evaluation. Before its first step, a trainer that starts again may get one that the trainer before has shown, of any version."""
        if not self._has_step and version < self._first_step and has_point(self._folder, "eval/version", version):
            return
        self._append_values(version, [_Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])

    def text(self, step: int, name: str, text: str) -> None:
        """A text, which TensorBoard shows as it is: as a block of code its Markdown does nothing."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = _TensorProto(dtype=_STRING, string_val=[block.encode(errors="replace")])
        kind = _SummaryMetadata(plugin_data=_SummaryMetadata.PluginData(plugin_name="text"))
        self._append_values(step, [_Summary.Value(tag=name, metadata=kind, tensor=tensor)])

    def image(self, step: int, name: str, png: bytes, size: tuple[int, int]) -> None:
        """An image of a step. size: width and height in pixels."""
        width, height = (str(number).encode() for number in size)
        shape = _TensorShape(dim=[_TensorShape.Dim(size=3)])
        tensor = _TensorProto(dtype=_STRING, tensor_shape=shape, string_val=[width, height, png])
        kind = image_metadata.create_summary_metadata(name, "", converted_to_tensor=False)
        self._append_values(step, [_Summary.Value(tag=name, metadata=kind, tensor=tensor)])

    def end(self, results: Mapping[str, float] | None) -> None:
        if results:
            scalars = [_Summary.Value(tag=name, simple_value=value) for name, value in results.items()]
            ended = _HParams.SessionEndInfo(status="STATUS_SUCCESS", end_time_secs=time.time())
            content = _HParams.HParamsPluginData(session_end_info=ended)
            self._append_hparams([*scalars, _hparams_value(hparams_metadata.SESSION_END_INFO_TAG, content)])
        self._file.close()

    def _begin_hparams(self, changed: Mapping[str, Any]) -> None:
        start = _HParams.SessionStartInfo(start_time_secs=time.time())
        for name, value in changed.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        content = _HParams.HParamsPluginData(session_start_info=start)
        self._append_hparams([_hparams_value(hparams_metadata.SESSION_START_INFO_TAG, content)])

    def _append_hparams(self, values: list[Any]) -> None:
        file = _new_file(self._folder / HPARAMS, self._deadline_s)
        file.append(_record(_Event(wall_time=time.time(), file_version="brain.Event:2")))
        file.append(_record(_Event(wall_time=time.time(), step=0, summary=_Summary(value=values))))
        file.close()

    def _append_values(self, step: int, values: list[Any]) -> None:
        self._append(_Event(wall_time=time.time(), step=step, summary=_Summary(value=values)))

    def _append(self, event: Any) -> None:
        self._file.append(_record(event))


def _new_file(folder: Path, deadline_s: float) -> AppendFile:
    when_writable(folder, lambda: make_folders(folder.parent, folder.name), deadline_s)
    name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    return AppendFile(folder / name, deadline_s)


def _record(event: Any) -> bytes:
    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()


def _histogram(name: str, found: Histogram) -> Any:
    """A tensor [K, 3]: the edges and the number of each of K intervals."""
    triples = zip(found.edges[:-1], found.edges[1:], found.counts, strict=True)
    numbers = [float(number) for triple in triples for number in triple]
    shape = _TensorShape(dim=[_TensorShape.Dim(size=len(found.counts)), _TensorShape.Dim(size=3)])
    tensor = _TensorProto(dtype=_DOUBLE, tensor_shape=shape, double_val=numbers)
    kind = histogram_metadata.create_summary_metadata(name, "")
    return _Summary.Value(tag=name, metadata=kind, tensor=tensor)


def _hparams_value(tag: str, content: Any) -> Any:
    kind = hparams_metadata.create_summary_metadata(content)
    return _Summary.Value(tag=tag, metadata=kind, tensor=hparams_metadata.NULL_TENSOR)
