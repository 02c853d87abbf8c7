"""The run's scalars as a file of TensorBoard's events.

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

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from ...comm.disk import AppendFile, make_folders, when_writable

_Event: Any = getattr(event_pb2, "Event")  # noqa: B009 - generated classes, which type checkers do not see
_SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
_Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009
_SummaryMetadata: Any = getattr(summary_pb2, "SummaryMetadata")  # noqa: B009
_TensorProto: Any = getattr(tensor_pb2, "TensorProto")  # noqa: B009
_STRING: Any = getattr(types_pb2, "DT_STRING")  # noqa: B009


class Board:
    """A new file of events in `folder`; TensorBoard forgets earlier files' steps from `first_step` on. Steps count from 1 here."""

    def __init__(self, folder: Path, first_step: int, deadline_s: float) -> None:
        when_writable(folder, lambda: make_folders(folder.parent, folder.name), deadline_s)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(folder / name, deadline_s)
        self._append(_Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = _SessionLog(status=_SessionLog.START)
        self._append(_Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step."""
        values = [_Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(_Event(wall_time=time.time(), step=step, summary=_Summary(value=values)))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step, which TensorBoard shows as it is: as a block of code its Markdown does nothing."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        tensor = _TensorProto(dtype=_STRING, string_val=[block.encode(errors="replace")])
        kind = _SummaryMetadata(plugin_data=_SummaryMetadata.PluginData(plugin_name="text"))
        value = _Summary.Value(tag=name, metadata=kind, tensor=tensor)
        self._append(_Event(wall_time=time.time(), step=step, summary=_Summary(value=[value])))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
