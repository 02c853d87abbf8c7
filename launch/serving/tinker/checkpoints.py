"""The states of models in training on the disk, from which a server that was started again goes on.

A checkpoint `step_N` is the state before request N to a model, where no gradient waits for an update. The requests from the oldest
checkpoint on are kept, so that a damaged one costs time and nothing else.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ....comm.disk import say
from ....comm.recipe import CheckpointSettings
from ....relay.checkpoints import CheckpointFolder
from ....trainer.checkpoint import CheckpointWriter
from .kept import KeptScripts

log = logging.getLogger(__name__)

PERIOD_S = 60.0
"""Most seconds between two checkpoints: what a new server computes again takes about as long."""
LEAST_SHARE = 10
"""Two checkpoints are at least this many times as far apart as it takes to write one."""
FETCHED_S = 60.0
"""Seconds for which a result is kept on the disk that a client has fetched: its answer may have been lost."""
KEPT = 2
DEADLINE_S = 600.0
"""Longest time for which a checkpoint that is being written does not grow."""
Stage = Callable[[], Callable[[Path], None]]


@dataclass(slots=True)
class _Written:
    """The checkpoints of a model."""

    writer: CheckpointWriter
    since: float = field(default_factory=time.monotonic)
    """When the last one was begun."""
    took_s: float = 0.0
    num_updates: int = 0
    """Updates of the model until then."""


class ModelCheckpoints:
    """Writes and finds the checkpoints of models, in the main thread."""

    def __init__(self, kept: KeptScripts, every: int | None) -> None:
        """every: most updates between two checkpoints, None for any number, 0 for no checkpoints but those that are needed."""
        self._kept = kept
        self._every = every
        self._models: dict[str, _Written] = {}

    def offer(self, model_id: str, number: int, num_updates: int, stage: Stage) -> None:
        """Write the state of a model before a request, if it is time for that. num_updates: of the model so far."""
        written = self._of(model_id)
        period_s = max(PERIOD_S, LEAST_SHARE * written.took_s)
        is_due = time.monotonic() - written.since >= period_s
        if self._every is not None:
            is_due = self._every > 0 and (is_due or num_updates >= written.num_updates + self._every)
        if is_due:
            self._begin(model_id, number, num_updates, stage)

    def write(self, model_id: str, number: int, num_updates: int, stage: Stage) -> None:
        """Write the state of a model before a request, whatever the time. Raises `OSError` where that cannot be done."""
        self._begin(model_id, number, num_updates, stage)
        self._wait(model_id)
        if number not in CheckpointFolder(self._kept.folder(model_id)).whole():
            raise OSError(f"the state of {model_id} could not be written; the server's output says why")

    def newest(self, model_id: str) -> tuple[int, Path] | None:
        """The number and the folder of the newest checkpoint that is not damaged; None without one."""
        folder = CheckpointFolder(self._kept.folder(model_id))
        for number in sorted(folder.whole(), reverse=True):
            if not (problem := folder.problem(number)):
                return number, folder.path(number)
            say(f"{folder.path(number)} {problem}; it is skipped")
        return None

    def drop(self, model_id: str) -> None:
        """Wait until nothing more is written of a model."""
        if model_id in self._models:
            self._wait(model_id)
            del self._models[model_id]

    def remove(self, model_id: str) -> None:
        """Remove a model that nobody can continue, with its requests."""
        self.drop(model_id)
        self._kept.remove_model(model_id)

    def close(self) -> None:
        """Wait for all that is being written."""
        for model_id in [*self._models]:
            self.drop(model_id)

    def _of(self, model_id: str) -> _Written:
        if model_id not in self._models:
            writer = CheckpointWriter(
                self._kept.folder(model_id),
                CheckpointSettings(keep=KEPT),
                DEADLINE_S,
                is_lead=True,
                on_written=lambda _step, _path: self._on_written(model_id),
            )
            self._models[model_id] = _Written(writer)
        return self._models[model_id]

    def _begin(self, model_id: str, number: int, num_updates: int, stage: Stage) -> None:
        self._wait(model_id)
        written = self._of(model_id)
        written.since = time.monotonic()
        written.num_updates = num_updates
        try:
            self._kept.sync_results(model_id)  # the requests before it may go
            written.writer.begin(number, stage)
        except Exception as error:  # noqa: BLE001 - of the thread that writes, and of its libraries
            self._give_up(model_id, error)

    def _wait(self, model_id: str) -> None:
        """Wait until the checkpoint is written that is being written."""
        try:
            self._of(model_id).writer.close()
        except Exception as error:  # noqa: BLE001 - of the thread that writes, and of its libraries
            self._give_up(model_id, error)

    def _give_up(self, model_id: str, error: Exception) -> None:
        """Go on without this checkpoint: the requests since the last one are all there."""
        say(f"a checkpoint of {model_id} could not be written: {error}; the next one is tried")
        log.warning("checkpoint of %s", model_id, exc_info=error)
        old = self._models.pop(model_id)
        new = self._of(model_id)
        new.took_s = old.took_s
        new.num_updates = old.num_updates

    def _on_written(self, model_id: str) -> None:
        """Remove the requests that no checkpoint needs, in the thread that has written one."""
        written = self._models.get(model_id)
        if written is not None:
            written.took_s = time.monotonic() - written.since
        whole = [*CheckpointFolder(self._kept.folder(model_id)).whole()]
        if len(whole) >= KEPT:
            self._kept.prune(model_id, whole[-KEPT], FETCHED_S)
