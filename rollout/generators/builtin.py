"""The project's own engine as a generator: `rollout.engine=builtin`."""

from typing import TYPE_CHECKING, Any

from ...trainer.policy.model import Policy, default_device, load_policy, load_tokenizer
from ..engine.chat_template import prompt_tokens
from ..engine.engine import Engine
from ..environments.schemas import tool_schemas
from ..environments.tokens import observation_tokens
from ..tensor_parallel.lockstep import LeadEngine, run_follower
from ..tensor_parallel.replica import TensorParallelGroup
from ..weights import RolloutWeights

if TYPE_CHECKING:
    from ...comm.fleet import Fleet
    from ...comm.recipe import Recipe
    from ..environments.base import Episode, Messages


class BuiltinGenerator(LeadEngine):
    """An engine whose policy's parameters are views of the rollout's weights; rank 0 of its replica."""

    can_migrate = True
    can_stream = True
    profile = None

    def __init__(self, fleet: "Fleet", recipe: "Recipe") -> None:
        replica, policy, weights = open_rank(fleet, recipe)
        super().__init__(replica, weights, policy, **replica_settings(recipe))
        self._data = recipe.data
        self._tools = tool_schemas(recipe.environment)
        fleet.announce(generator=self.description)
        self.context = policy.context
        self.kv_capacity = self.pool.num_pages * self.pool.page_size
        self.kv_token_bytes = self.cache.num_bytes // self.kv_capacity

    @property
    def num_prefilled(self) -> int:
        return self.scheduler.num_prefilled

    @property
    def num_found(self) -> int:
        return self.scheduler.prefixes.num_found

    @property
    def kv_load(self) -> int:
        """Tokens that the pages in use have room for."""
        return (self.pool.num_pages - self.pool.num_free) * self.pool.page_size

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        return prompt_tokens(row, self.text.tokenizer, self._data, self._tools)

    def observation_ids(self, episode: "Episode", observation: "str | Messages") -> list[int]:
        return observation_tokens(episode, observation, self.text.tokenizer, self._data, self._tools)

    def close(self) -> None:
        super().close()
        self.weights.close()


def run(fleet: "Fleet", recipe: "Recipe") -> None:
    """The process of a shard, rank 1 or later of a rollout: it repeats the calls of rank 0 and has no other peer."""
    replica, policy, weights = open_rank(fleet, recipe)
    run_follower(replica, Engine(policy, **replica_settings(recipe)), weights)
    weights.close()


def open_rank(fleet: "Fleet", recipe: "Recipe") -> tuple[TensorParallelGroup, Policy, RolloutWeights]:
    """This rank of a replica, once all ranks have joined: its policy and the weights that fill it."""
    device = default_device()
    replica = TensorParallelGroup.join(fleet, recipe.rollout.tp, device, recipe.comm.deadline_s)
    policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=recipe.lora.rank > 0)
    weights = RolloutWeights(fleet, policy, recipe.comm, recipe.run.dir, replica.tensor_parallel, device, recipe.lora)
    return replica, policy, weights


def replica_settings(recipe: "Recipe") -> dict[str, Any]:
    """The arguments of the `Engine` of each rank."""
    tokenizer = load_tokenizer(recipe.model.path)
    return {"max_running": recipe.generator.num_slots, "tokenizer": tokenizer, **engine_settings(recipe)}


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
