"""The trainer of a simulated run: its weights are the rows that they were trained on, so two versions can be compared."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from ...comm.clock import Clock
from ...comm.fleet import Fleet
from ...comm.recipe import Recipe
from ...relay.queue.batch import Batch
from ...trainer.learners.emulated import EmulatedLearner
from ...trainer.step_stats import StepStats
from .training import VirtualPublisher

_DIGEST_FILE = "digest"


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

    def accumulate(self, batch: Batch, stats: StepStats) -> None:
        self._rows += [row.key for row in batch.rows]
        super().accumulate(batch, stats)

    def step(self, stats: StepStats) -> dict[str, float]:
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
