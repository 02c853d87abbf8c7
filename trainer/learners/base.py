"""The interface between the trainer's loop and an engine, and the choice of the engine by `trainer.engine`."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from ...comm.fleet import Fleet
from ...comm.plugins import adapter_class
from ...comm.recipe import Recipe
from ...relay.queue.batch import Batch
from ..actor_group import ActorGroup
from ..step_metrics import StepMetrics

_LEARNERS = {
    "builtin": ".builtin:ActorLearner",
    "emulated": "headrace.launch.lab.emulated.learner:EmulatedLearner",
}
"""Classes, called with (fleet, recipe)."""


class Learner(Protocol):
    """One rank of an engine, with its share of the weights and their publisher."""

    group: ActorGroup
    num_bytes: int
    """Size of one version of the weights."""

    @property
    def version(self) -> int:
        """The version in training: the number of steps so far."""
        ...

    def accumulate(self, batch: Batch, stats: StepMetrics) -> None:
        """Add the gradient of this rank's micro-batches, and the batch to `stats`; a collective of all ranks."""
        ...

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs of the initial policy, for the task `reference`: [R] for each of this rank's rows; a collective of all ranks."""
        ...

    def step(self, stats: StepMetrics) -> dict[str, float]:
        """Finish the updates of the step; returns their metrics."""
        ...

    def discard(self) -> None:
        """Discard the accumulated gradient: the run ends within a step."""
        ...

    def publish(self) -> None:
        """Publish the present weights to the relays; returns when training may continue."""
        ...

    def export(self) -> str:
        """Write the weights for users; returns the folder."""
        ...

    def stage(self) -> Callable[[Path], None]:
        """Copy the weights and all else that training needs to continue; a collective of all ranks.

        The result writes the copies into a folder, while training goes on; every rank calls it, in a thread.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Continue from a folder that `stage` wrote; a collective. Raises `SettingError` if its content does not fit."""
        ...

    def close(self) -> None:
        """Deliver the published weights, and close the group of ranks."""
        ...


def open_learner(fleet: Fleet, recipe: Recipe) -> Learner:
    """The learner that `trainer.engine` names, with the initial weights."""
    return adapter_class("trainer.engine", recipe.trainer.engine, _LEARNERS, __package__)(fleet, recipe)
