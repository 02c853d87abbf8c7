"""The interface of a generator, and the choice of the implementation by `rollout.engine`.

The rollout's loop works with any generator: the project's own engine, vLLM, an emulated device, or a user's. The module of a
generator is imported when it is chosen, so that an emulated rollout loads no library of models.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ...comm.plugins import adapter_class

if TYPE_CHECKING:
    from ...comm.fleet import Fleet
    from ...comm.messages.weights import WeightsPulled
    from ...comm.recipe import Recipe
    from ..engine.sampling import SamplingParams
    from ..engine.sequence import Completion, SequenceProgress, SequenceState
    from ..environments.base import Episode, Messages

_ADAPTERS = {
    "builtin": ".builtin:BuiltinGenerator",
    "vllm": ".vllm_engine.generator:VllmGenerator",
    "emulated": "headrace.launch.lab.emulated.generator:EmulatedGenerator",
}
"""Classes, called with (fleet, recipe)."""


class Weights(Protocol):
    """The weights of a generator."""

    version: int
    """The loaded version; -1 before the first."""

    def newest(self) -> int:
        """The newest available version; -1 before the first. Cheap: the loop calls it at every turn."""
        ...


class GeneratorProfile(NamedTuple):
    """`batch_bound` is in trajectories, `prefill_s` in seconds per token."""

    batch_bound: int
    prefill_s: float


class PromptGenerator(Protocol):
    """Generates samples of prompts."""

    context: int
    """Most tokens of prompt and response together."""

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of the prompt of a data set's row."""
        ...

    def add_group(self, prompt_ids: list[int], params: "SamplingParams", trajectory_ids: Sequence[int]) -> None:
        """Queue one sample of a prompt per trajectory id."""
        ...


class Generator(PromptGenerator, Protocol):
    """One replica of a generator with its weights; used by one thread."""

    can_migrate: bool
    """Whether `export_sequences` and `import_sequences` work."""
    can_stream: bool
    """Whether `responses` works, `take_weights` has older versions, and a step adds one token to a trajectory."""
    kv_capacity: int
    """Tokens that the KV cache holds."""
    kv_token_bytes: int
    """Bytes of one token's keys and values."""

    @property
    def profile(self) -> GeneratorProfile | None:
        """Its speed, if that is known; None to measure it before trajectories move."""
        ...

    @property
    def weights(self) -> Weights:
        """Its weights."""
        ...

    @property
    def num_running(self) -> int:
        """Trajectories that decode."""
        ...

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for a place in the batch."""
        ...

    @property
    def num_sampled(self) -> int | None:
        """Tokens drawn so far; None to take what is known of the trajectories."""
        ...

    @property
    def num_recomputed(self) -> int:
        """Tokens so far whose keys and values are computed again, after new weights midway or because of a full cache."""
        ...

    @property
    def recomputed(self) -> Mapping[str, int]:
        """These tokens by what dropped them; empty if that is unknown."""
        ...

    @property
    def num_prefilled(self) -> int:
        """Tokens so far whose keys and values were computed by a prefill; 0 if that is unknown."""
        ...

    @property
    def num_found(self) -> int:
        """Tokens so far whose keys and values were found in the prefix cache."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it holds no trajectory."""
        ...

    @property
    def kv_load(self) -> int:
        """Tokens in the KV cache."""
        ...

    def step(self) -> "list[Completion]":
        """Advance the queued and running trajectories by a step; returns the finished ones."""
        ...

    def unfinished(self) -> "list[SequenceProgress]":
        """Every unfinished trajectory."""
        ...

    def responses(self) -> "list[SequenceState]":
        """Every unfinished trajectory, with its response so far and without its cache. They stay."""
        ...

    def take_weights(self, deadline_s: float, version: int | None = None) -> "WeightsPulled":
        """Switch to the newest version. Unfinished trajectories continue under it, with their caches computed again.

        While it has no leased ones, to `version` if one is given. Raises `VersionNotAvailable` if no process has that one any more;
        the weights are undefined then until the next call.
        """
        ...

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> "list[SequenceState]":
        """Remove unfinished trajectories for another generator on the same weights; a finished one stays."""
        ...

    def import_sequences(self, states: "Sequence[SequenceState]") -> None:
        """Continue trajectories that another generator exported, or that a dead one had begun.

        The random numbers of a response depend on its `key` and on the position alone, so that it has the tokens of an unbroken one. An
        engine that cannot keep to this draws others, but never those of the tokens before again. It may ignore a cache.
        """
        ...

    def close(self) -> None:
        """Release connections and memory."""
        ...


@runtime_checkable
class PausingGenerator(Protocol):
    """The methods that environments and tools need of a generator in addition; `SamplingParams.pause_at_stop` makes it pause."""

    def resume(self, trajectory_id: int, token_ids: Sequence[int]) -> bool:
        """Continue a paused trajectory after these tokens; False if they leave no room for another."""
        ...

    def observation_ids(self, episode: "Episode", observation: "str | Messages") -> list[int]:
        """Token ids that follow the newest turn: the observation, and the head of the next turn."""
        ...


def open_generator(fleet: "Fleet", recipe: "Recipe") -> Generator:
    """The generator that `rollout.engine` names: one of the project's, or a user's class with the same signature."""
    return adapter_class("rollout.engine", recipe.rollout.engine, _ADAPTERS, __package__)(fleet, recipe)
