"""A trainer on emulated devices: `trainer.engine=emulated`. It fetches rows and sleeps instead of computing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ....comm.clock import REAL_TIME, Clock
from ....comm.fleet import Fleet
from ....comm.recipe import Recipe
from ....relay.queue.batch import Batch
from ....relay.queue.micro_batches import Sized, rounds
from ....relay.weights.layout import Layout
from ....relay.weights.publisher import WeightPublisher
from ....trainer.actor_group import ActorGroup
from ....trainer.step_metrics import StepMetrics
from ..settings import LabSettings, lab_of
from .transfer import EmulatedTransfer, dummy_weights

_VERSION_FILE = "version"


class Publisher(Protocol):
    """The beginning of the weights' way, as `WeightPublisher` is one."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None: ...


class EmulatedLearner:
    """Counts tokens, and sleeps for the time that devices would need for them."""

    def __init__(
        self, fleet: Fleet, recipe: Recipe, clock: Clock | None = None, publisher: Publisher | None = None
    ) -> None:
        e = lab_of(recipe.lab)
        self.group = ActorGroup(0, 1, torch.device("cpu"), recipe.comm.deadline_s)
        self.version = 0
        self._settings = e
        self._token_s = e.train_us * 1e-6 / e.train_gpus
        self._micro_tokens = recipe.optimizer.micro_batch
        self._update_ends = recipe.batch.update_ends
        self._num_groups = 0
        self._transfer = EmulatedTransfer(e, recipe.run.schedule)
        self._clock = clock or REAL_TIME
        self._until = self._clock.now()
        self._busy_s = 0.0
        self._weights = dummy_weights()
        layout = Layout.of(self._weights, torch.float32)
        self._publisher = publisher or WeightPublisher(fleet, layout, recipe.comm)
        self.num_bytes = layout.num_bytes

    def accumulate(self, batch: Batch, stats: StepMetrics) -> None:
        """Return when the devices would be done with the batch, and with the update that follows it."""
        self._begin()
        stats.add(batch)
        self._sleep_for(training_s(batch.rows, self._settings, self._micro_tokens))
        self._num_groups += len(batch.row_batch.groups)
        if self._num_groups in self._update_ends:
            self._sleep_for(self._settings.update_s)

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """Zeros, after the time of a forward pass, which is a third of a step's."""
        self._begin()
        self._sleep_for(sum(row.num_tokens for row in batch.rows) * self._token_s / 3)
        return [np.zeros(len(ids), np.float32) for ids in batch["response_ids"]]

    def step(self, stats: StepMetrics) -> dict[str, float]:
        self.version += 1
        self._num_groups = 0
        self._weights["weights"].fill_(float(self.version))
        busy_s = self._busy_s
        self._busy_s = 0.0
        return {"actor/grad_norm": 0.0, "actor/lr": 0.0, "timing_s/update_actor": busy_s}

    def discard(self) -> None:
        self._num_groups = 0

    def publish(self) -> None:
        """Publish the small buffer; return when a real version would be copied."""
        self._begin()
        self._publisher.publish(self.version, self._weights)
        if self.version:
            self._sleep_for(self._transfer.push_s)

    def export(self) -> str:
        return ""

    def stage(self) -> Callable[[Path], None]:
        version = str(self.version)

        def write(folder: Path) -> None:
            (folder / _VERSION_FILE).write_text(version, encoding="utf-8")

        return write

    def restore(self, folder: Path) -> None:
        self.version = int((folder / _VERSION_FILE).read_text(encoding="utf-8"))

    def close(self) -> None:
        self._publisher.close()

    def _begin(self) -> None:
        """New work begins now, not at the end of the work before it."""
        self._until = max(self._until, self._clock.now())

    def _sleep_for(self, seconds: float) -> None:
        self._until += seconds
        self._busy_s += seconds
        self._clock.sleep_until(self._until)


def training_s(rows: Sequence[Sized], e: LabSettings, micro_tokens: int) -> float:
    """Seconds of the micro-batches of these rows. In each one the ranks, which have whole rows, wait for the one with most tokens."""
    dealt = rounds(rows, e.trainer_ranks, micro_tokens)
    most = [max(sum(row.num_tokens for row in part) for part in parts) for parts in dealt]
    token_s = e.train_us * 1e-6 / e.train_gpus * e.trainer_ranks
    waits_s = sum(max(0.0, e.collectives_s - num * token_s) for num in most)
    return sum(most) * token_s + len(dealt) * e.micro_batch_s + waits_s
