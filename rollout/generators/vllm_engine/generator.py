"""vLLM in a run: weights from the relay, prompts from the data, the ranks of a replica."""

from typing import TYPE_CHECKING, Any

from ....trainer.policy.model import Policy, default_device, load_policy, load_tokenizer
from ...engine.chat_template import prompt_tokens
from ...engine.text import Text
from ...environments.schemas import tool_schemas
from ...environments.tokens import observation_tokens
from ...tensor_parallel.lockstep import Lead, run_follower
from ...tensor_parallel.replica import TensorParallelGroup
from ...weights import RolloutWeights
from .engine import VllmEngine
from .package import check_vllm

if TYPE_CHECKING:
    from ....comm.fleet import Fleet
    from ....comm.recipe import Recipe
    from ...environments.base import Episode, Messages


class VllmGenerator(Lead, VllmEngine):  # pyright: ignore[reportIncompatibleMethodOverride] - `Lead` is typed for `Engine`
    """vLLM with the versions of a relay; rank 0 of its replica. The host holds one copy of a version, which vLLM copies into its
    own layout."""

    can_migrate = True
    can_stream = True
    profile = None

    def __init__(self, fleet: "Fleet", recipe: "Recipe") -> None:
        check_vllm(recipe)
        replica, policy, weights = _open_rank(fleet, recipe)
        super().__init__(replica, weights, policy, **_engine_settings(recipe))
        self._data = recipe.data
        self._tools = tool_schemas(recipe.environment)
        fleet.announce(generator=self.description)

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        return prompt_tokens(row, self.text.tokenizer, self._data, self._tools)

    def observation_ids(self, episode: "Episode", observation: "str | Messages") -> list[int]:
        return observation_tokens(episode, observation, self.text.tokenizer, self._data, self._tools)

    def close(self) -> None:
        super().close()
        self.weights.close()


def run(fleet: "Fleet", recipe: "Recipe") -> None:
    """The process of a shard, rank 1 or later of a rollout: it repeats the calls of rank 0 and has no other peer."""
    check_vllm(recipe)
    replica, policy, weights = _open_rank(fleet, recipe)
    run_follower(replica, VllmEngine(policy, **_engine_settings(recipe)), weights)
    weights.close()


def _open_rank(fleet: "Fleet", recipe: "Recipe") -> tuple[TensorParallelGroup, Policy, RolloutWeights]:
    """This rank of a replica, once all ranks have joined: a policy on the host, and the weights that fill it, whole on each rank."""
    replica = TensorParallelGroup.join(fleet, recipe.rollout.tp, default_device(), recipe.comm.deadline_s)
    policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=recipe.lora.rank > 0)
    return replica, policy, RolloutWeights(fleet, policy, recipe.comm, recipe.run.dir, lora=recipe.lora)


def _engine_settings(recipe: "Recipe") -> dict[str, Any]:
    """The arguments of the `VllmEngine` of each rank."""
    g = recipe.generator
    return {
        "path": recipe.model.path,
        "text": Text(load_tokenizer(recipe.model.path)),
        "max_running": g.num_slots,
        "seed": recipe.run.seed,
        "kv_gb": g.kv_gb,
        "prefill_tokens": g.prefill_tokens,
        "gpu_share": g.gpu_share,
        "device": default_device(),
        "tp": recipe.rollout.tp,
    }
