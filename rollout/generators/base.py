"""What the rollout's loop asks of whatever generates, and the choice by `rollout.engine`.

A generator may come and go without the loop's knowing: the project's own engine, a library's, or a device that is emulated.
An adapter's module is imported when it is chosen, so that an emulated rollout loads no library of models.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from ...comm.fleet import Fleet
from ...comm.plugins import adapter_class
from ...comm.recipe import Recipe
from ...relay.weights.slots import Receipt
from ..engine.sampling import SamplingParams
from ..engine.sequence import Completion, SequenceProgress, SequenceState

_ADAPTERS = {
    "builtin": ".builtin:BuiltinGenerator",
    "emulated": ".emulated:EmulatedGenerator",
    "transformers": ".transformers:TransformersGenerator",
}
"""Classes, called with (fleet, recipe)."""


class Weights(Protocol):
    """The weights that a generator runs on."""

    version: int
    """The version that is loaded; -1 before the first."""

    def newest(self) -> int:
        """The newest version that could be taken now; -1 before the first. Cheap: asked at every turn of the loop."""
        ...


class Generator(Protocol):
    """One replica of a generator with its weights; called by one thread."""

    weights: Weights
    can_migrate: bool
    """Whether `export_sequences` and `import_sequences` work."""
    context: int
    """Most tokens of prompt and response."""
    kv_capacity: int
    """Tokens that the KV cache holds."""
    kv_token_bytes: int
    """Bytes of one token's keys and values."""

    @property
    def num_running(self) -> int:
        """Trajectories that decode."""
        ...

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for a place in the batch."""
        ...

    @property
    def num_recomputed(self) -> int:
        """Tokens so far whose keys and values were given up, to be computed again: new weights midway, a full cache."""
        ...

    @property
    def idle(self) -> bool:
        """It holds no trajectory at all."""
        ...

    @property
    def kv_load(self) -> int:
        """Tokens in the KV cache."""
        ...

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of the prompt of a data set's row."""
        ...

    def add_group(self, prompt_ids: list[int], params: SamplingParams, trajectory_ids: Sequence[int]) -> None:
        """Queue one sample of a prompt per trajectory id."""
        ...

    def step(self) -> list[Completion]:
        """Go on a little with everything that is queued or runs; returns what has finished."""
        ...

    def unfinished(self) -> list[SequenceProgress]:
        """Every unfinished trajectory."""
        ...

    def take_weights(self, deadline_s: float) -> Receipt:
        """Switch to the newest version. Unfinished trajectories go on under it, with their caches computed anew."""
        ...

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> list[SequenceState]:
        """Remove trajectories for another generator on the same weights; one that has just finished stays."""
        ...

    def import_sequences(self, states: Sequence[SequenceState]) -> None:
        """Go on with trajectories that another generator took out."""
        ...

    def close(self) -> None:
        """Let go of wires and memory."""
        ...


def open_generator(fleet: Fleet, recipe: Recipe) -> Generator:
    """The generator that `rollout.engine` names: one of the project's, or a class of the user's with the same signature."""
    return adapter_class("rollout.engine", recipe.rollout.engine, _ADAPTERS, __package__)(fleet, recipe)
