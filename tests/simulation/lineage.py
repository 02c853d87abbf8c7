"""The trainer and the reference of a simulated run, whose numbers tell which rows they are of.

The trainer's weights are the rows that they were trained on, so two versions can be compared. The reference's column is made from the
row's key, which has the attempt in it, so the trainer can tell that of another row or attempt.
"""

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.comm.clock import Clock
from headrace.comm.fleet import Fleet
from headrace.comm.recipe import Recipe
from headrace.launch.lab.emulated.learner import EmulatedLearner
from headrace.launch.lab.virtual.training import VirtualPublisher
from headrace.relay.queue.batch import Batch
from headrace.trainer.step_metrics import StepMetrics

REFERENCE_TOKEN_S = 0.0005
"""Emulated seconds of the reference, for each token."""
_DIGEST_FILE = "digest"


def reference_column(key: str, num_tokens: int) -> np.ndarray:
    """[R] float32: the number of a row."""
    return np.full(num_tokens, zlib.crc32(key.encode()) % 9973, np.float32)


def reference_columns(clock: Clock, batch: Batch) -> list[np.ndarray]:
    """[R] for each row of a batch, after the time that a device needs for them."""
    clock.sleep_until(clock.now() + REFERENCE_TOKEN_S * sum(row.num_tokens for row in batch.rows))
    return [reference_column(row.key, len(batch.columns[row.key]["response_ids"])) for row in batch.rows]


class LineageLearner(EmulatedLearner):
    """An emulated learner whose weights are the rows that they were trained on: two versions with one digest are the same weights."""

    def __init__(
        self,
        fleet: Fleet,
        recipe: Recipe,
        clock: Clock,
        publish: Callable[[int, str], None],
        on_step: Callable[[int, list[str]], None],
    ) -> None:
        """`publish` gets each version with its digest, `on_step` each step with the keys of its rows, before anyone hears of it."""
        super().__init__(fleet, recipe, clock, VirtualPublisher(lambda version: publish(version, self.digest)))
        self.digest = "start"
        self._on_step = on_step
        self._rows: list[str] = []
        self._has_reference = recipe.roles.reference > 0

    def accumulate(self, batch: Batch, stats: StepMetrics) -> None:
        """Raises `AssertionError` if a row has another one's reference column, or none."""
        for row in batch.rows if self._has_reference else ():
            columns = batch.columns[row.key]
            expected = reference_column(row.key, len(columns["response_ids"]))
            assert np.array_equal(columns["ref_logprobs"], expected), f"{row.key} has the reference of another row"
        self._rows += [row.key for row in batch.rows]
        super().accumulate(batch, stats)

    def step(self, stats: StepMetrics) -> dict[str, float]:
        rows, self._rows = sorted(self._rows), []
        self._on_step(self.version, rows)
        self.digest = hashlib.sha256(" ".join([self.digest, *rows]).encode()).hexdigest()[:12]
        return super().step(stats)

    def discard(self) -> None:
        self._rows = []
        super().discard()

    def stage(self) -> Callable[[Path], None]:
        write_version, digest = super().stage(), self.digest

        def write(folder: Path) -> None:
            write_version(folder)
            (folder / _DIGEST_FILE).write_text(digest, encoding="utf-8")

        return write

    def restore(self, folder: Path) -> None:
        super().restore(folder)
        self.digest = (folder / _DIGEST_FILE).read_text(encoding="utf-8")
