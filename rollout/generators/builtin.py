"""The project's own engine as a generator: `rollout.engine=builtin`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...trainer.policy.model import default_device, load_policy, load_tokenizer
from ..engine.chat_template import prompt_tokens
from ..engine.engine import Engine
from ..environments.schemas import tool_schemas
from ..environments.tokens import observation_tokens
from ..tensor_parallel.lockstep import LeadEngine, run_follower
from ..tensor_parallel.replica import TensorParallelGroup
from ..weights import RolloutWeights

if TYPE_CHECKING:
    from ...comm.fleet import Fleet
    from ...comm.messages.weights import WeightsPulled
    from ...comm.recipe import Recipe
    from ..engine.sampling import SamplingParams
    from ..engine.sequence import Completion, SequencePart, SequenceProgress, SequenceState
    from ..environments.base import Episode, Messages


class BuiltinGenerator:
    """An engine whose policy's parameters are views of the rollout's weights; rank 0 of its replica."""

    can_migrate = True
    can_stream = True
    profile = None

    def __init__(self, fleet: "Fleet", recipe: "Recipe") -> None:
        self._data = recipe.data
        replica, self.engine, self.weights = open_rank(fleet, recipe)
        self.lead = LeadEngine(replica, self.engine)
        self._tools = tool_schemas(recipe.environment)
        fleet.announce(generator=self.engine.description)
        self.context = self.engine.policy.context
        self.kv_capacity = self.engine.pool.num_pages * self.engine.pool.page_size
        self.kv_token_bytes = self.engine.cache.num_bytes // self.kv_capacity

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def num_recomputed(self) -> int:
        return self.engine.num_recomputed

    @property
    def num_prefilled(self) -> int:
        return self.engine.scheduler.num_prefilled

    @property
    def num_found(self) -> int:
        return self.engine.scheduler.prefixes.num_found

    @property
    def idle(self) -> bool:
        return self.engine.idle

    @property
    def kv_load(self) -> int:
        """Tokens that the pages in use have room for."""
        return (self.engine.pool.num_pages - self.engine.pool.num_free) * self.engine.pool.page_size

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        return prompt_tokens(row, self.engine.text.tokenizer, self._data, self._tools)

    def observation_ids(self, episode: "Episode", observation: "str | Messages") -> list[int]:
        return observation_tokens(episode, observation, self.engine.text.tokenizer, self._data, self._tools)

    def add_group(self, prompt_ids: list[int], params: "SamplingParams", trajectory_ids: Sequence[int]) -> None:
        self.lead.add_group(prompt_ids, params, trajectory_ids)

    def resume(self, trajectory_id: int, token_ids: Sequence[int]) -> bool:
        return self.lead.resume(trajectory_id, token_ids)

    def step(self) -> "list[Completion]":
        return self.lead.step()

    def unfinished(self) -> "list[SequenceProgress]":
        return self.engine.unfinished()

    def responses(self) -> "list[SequencePart]":
        return self.engine.responses()

    def take_weights(self, deadline_s: float, version: int | None = None) -> "WeightsPulled":
        return self.lead.take_weights(self.weights, deadline_s, version)

    def export_sequences(self, trajectory_ids: Sequence[int], with_cache: bool = False) -> "list[SequenceState]":
        return self.lead.export_sequences(trajectory_ids, with_cache)

    def import_sequences(self, states: "Sequence[SequenceState]") -> None:
        self.lead.import_sequences(states)

    def close(self) -> None:
        self.lead.close()
        self.weights.close()


def run(fleet: "Fleet", recipe: "Recipe") -> None:
    """The process of a shard, rank 1 or later of a rollout: it repeats the calls of rank 0 and has no other peer."""
    replica, engine, weights = open_rank(fleet, recipe)
    run_follower(replica, engine, weights)
    weights.close()


def open_rank(fleet: "Fleet", recipe: "Recipe") -> tuple[TensorParallelGroup, Engine, RolloutWeights]:
    """This rank of a replica, once all ranks have joined: its engine and the weights that fill the engine's policy."""
    device = default_device()
    replica = TensorParallelGroup.join(fleet, recipe.rollout.tp, device, recipe.comm.deadline_s)
    policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=recipe.lora.rank > 0)
    weights = RolloutWeights(fleet, policy, recipe.comm, recipe.run.dir, replica.tensor_parallel, device, recipe.lora)
    engine = Engine(
        policy,
        max_running=recipe.generator.num_slots,
        tokenizer=load_tokenizer(recipe.model.path),
        **engine_settings(recipe),
    )
    return replica, engine, weights


def engine_settings(recipe: "Recipe") -> dict[str, Any]:
    """The arguments of `Engine` that are settings of a recipe, for a rollout and for an evaluation without a run."""
    g = recipe.generator
    return {
        "seed": recipe.run.seed,
        "kv_gb": g.kv_gb,
        "exact": g.exact,
        "prefill_tokens": g.prefill_tokens,
        "attention": g.attention,
        "gpu_share": g.gpu_share,
    }
