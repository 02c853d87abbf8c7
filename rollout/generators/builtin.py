"""The project's own engine behind the adapter's protocol: `rollout.engine=builtin`."""

from typing import Any

from ...comm.fleet import Fleet
from ...comm.recipe import Recipe
from ...relay.weights.slots import Receipt
from ...trainer.policy.model import Policy, default_device, load_policy, load_tokenizer
from ..engine.engine import Engine
from ..engine.text import prompt_tokens
from ..tensor_parallel.lockstep import LeadEngine, close_together, run_follower, take_newest
from ..tensor_parallel.replica import TensorParallelGroup
from ..weights import RolloutWeights


class BuiltinGenerator(LeadEngine):
    """The engine with a policy whose parameters are views of the rollout's weights; of several ranks the first one's."""

    can_migrate = True

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        replica = join_replica(fleet, recipe)
        self.tokenizer = load_tokenizer(recipe.model.path)
        policy, self.weights = load(fleet, recipe, replica)
        super().__init__(replica, policy, tokenizer=self.tokenizer, **options(recipe))
        fleet.announce(generator=self.description)
        self.context = policy.context
        self.kv_capacity = self.pool.num_pages * self.pool.page_size
        self.kv_token_bytes = self.cache.num_bytes // self.kv_capacity

    @property
    def kv_load(self) -> int:
        """Tokens that the pages in use have room for."""
        return (self.pool.num_pages - self.pool.num_free) * self.pool.page_size

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """Token ids of a row's prompt."""
        return prompt_tokens(row, self.tokenizer)

    def take_weights(self, deadline_s: float) -> Receipt:
        """Switch to the newest version; what is unfinished goes on under it."""
        self.recompute()
        receipt = take_newest(self.replica, self.weights, deadline_s)
        self.weights_changed()
        return receipt

    def close(self) -> None:
        """End the other ranks, let go of the relay's memory."""
        close_together(self.replica)
        self.weights.close()


def run(fleet: Fleet, recipe: Recipe) -> None:
    """The process of a shard, rank 1 or later of a rollout: does what rank 0 does, and talks to nobody else."""
    replica = join_replica(fleet, recipe)
    policy, weights = load(fleet, recipe, replica)
    run_follower(replica, Engine(policy, tokenizer=load_tokenizer(recipe.model.path), **options(recipe)), weights)
    weights.close()


def join_replica(fleet: Fleet, recipe: Recipe) -> TensorParallelGroup:
    """This rank among those of its rollout."""
    return TensorParallelGroup.join(
        fleet, recipe.rollout.tp, default_device(exact=recipe.generator.exact), recipe.comm.deadline_s
    )


def load(fleet: Fleet, recipe: Recipe, replica: TensorParallelGroup) -> tuple[Policy, RolloutWeights]:
    """This rank's part of the policy, and the weights that fill it."""
    policy = load_policy(recipe.model.path, recipe.model.dtype, weights=False, exact=recipe.generator.exact)
    return policy, RolloutWeights(
        fleet,
        policy,
        recipe.comm,
        recipe.run.dir,
        replica.tensor_parallel,
        default_device(exact=recipe.generator.exact),
    )


def options(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of the engine."""
    g = recipe.generator
    return {
        "max_running": g.max_running,
        "seed": recipe.run.seed,
        "kv_gb": g.kv_gb,
        "exact": g.exact,
        "prefill_tokens": g.prefill_tokens,
        "attention": g.attention,
        "gpu_share": g.gpu_share,
    }
