"""What TensorBoard's files of a run show already, for a trainer that continues it."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2

_Event: Any = getattr(event_pb2, "Event")  # noqa: B009 - a generated class, which type checkers do not see


def has_point(folder: Path, tag: str, step: int) -> bool:
    """Whether a file of events in `folder` has a point of the tag at the step. It reads all files, some seconds for those of a long run."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in RawEventFileLoader(str(path)).Load():
            event = _Event.FromString(record)
            if event.step == step and any(value.tag == tag for value in event.summary.value):
                return True
    return False
