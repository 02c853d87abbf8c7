"""What the trainer's loop asks of whatever trains, and the choice by `trainer.engine`."""

from typing import Protocol

import numpy as np

from ...comm.fleet import Fleet
from ...comm.plugins import adapter_class
from ...comm.recipe import Recipe
from ...relay.queue.stream import Batch
from ..actor_group import ActorGroup
from ..step_stats import StepStats

_LEARNERS = {"builtin": ".builtin:ActorLearner", "emulated": ".emulated:EmulatedLearner"}
"""Classes, called with (fleet, recipe)."""


class Learner(Protocol):
    """One rank of what trains, with its share of the weights and its end of their way down."""

    group: ActorGroup
    num_bytes: int
    """Of one version of the weights."""

    @property
    def version(self) -> int:
        """The version in training: the number of updates behind the weights."""
        ...

    def accumulate(self, batch: Batch, stats: StepStats) -> None:
        """Add the gradient of this rank's micro-batches, and the batch to the tally; a collective of all ranks."""
        ...

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """By the initial policy, where the trainer's ranks do the task `reference`: [R] for each row of this rank's; a
        collective of all ranks."""
        ...

    def step(self, stats: StepStats) -> dict[str, float]:
        """Update the weights by what was accumulated; returns the metrics of the update."""
        ...

    def discard(self) -> None:
        """Forget what was accumulated: the run ends within a step."""
        ...

    def publish(self) -> None:
        """Hand the present weights over to the relays; returns when training may go on."""
        ...

    def export(self) -> str:
        """Write the weights for users; returns the folder."""
        ...

    def checkpoint(self) -> str:
        """Write weights for users and all that `run.resume` needs; returns the folder."""
        ...

    def close(self) -> None:
        """Deliver what was published, and end the group of ranks."""
        ...


def open_learner(fleet: Fleet, recipe: Recipe) -> Learner:
    """The learner that `trainer.engine` names; from the newest checkpoint where `run.resume` says so."""
    return adapter_class("trainer.engine", recipe.trainer.engine, _LEARNERS, __package__)(fleet, recipe)
