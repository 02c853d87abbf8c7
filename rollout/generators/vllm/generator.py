"""vLLM in a run: weights from the relay, prompts from the data."""

from typing import TYPE_CHECKING, Any

from ....trainer.policy.model import default_device, load_policy, load_tokenizer
from ...engine.chat_template import prompt_tokens
from ...engine.text import Text
from ...environments.schemas import tool_schemas
from ...environments.tokens import observation_tokens
from ...weights import RolloutWeights
from .engine import VllmEngine
from .package import check_vllm

if TYPE_CHECKING:
    from ....comm.fleet import Fleet
    from ....comm.messages.weights import WeightsPulled
    from ....comm.recipe import Recipe
    from ...environments.base import Episode, Messages


class VllmGenerator(VllmEngine):
    """vLLM with the versions of a relay. The host holds one copy of a version, which vLLM copies into its own layout."""

    can_migrate = True
    can_stream = True
    profile = None

    def __init__(self, fleet: "Fleet", recipe: "Recipe") -> None:
        check_vllm(recipe)
        g = recipe.generator
        tokenizer = load_tokenizer(recipe.model.path)
        policy = load_policy(recipe.model.path, recipe.model.compute_type, weights=recipe.lora.rank > 0)
        super().__init__(
            policy,
            recipe.model.path,
            Text(tokenizer),
            max_running=g.num_slots,
            seed=recipe.run.seed,
            kv_gb=g.kv_gb,
            prefill_tokens=g.prefill_tokens,
            gpu_share=g.gpu_share,
            device=default_device(),
        )
        self.weights = RolloutWeights(fleet, policy, recipe.comm, recipe.run.dir, lora=recipe.lora)
        self._data = recipe.data
        self._tools = tool_schemas(recipe.environment)
        fleet.announce(generator=self.description)

    def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        return prompt_tokens(row, self.text.tokenizer, self._data, self._tools)

    def observation_ids(self, episode: "Episode", observation: "str | Messages") -> list[int]:
        return observation_tokens(episode, observation, self.text.tokenizer, self._data, self._tools)

    def take_weights(self, deadline_s: float, version: int | None = None) -> "WeightsPulled":
        """Switch to the newest version, or to `version`."""
        pulled = self.weights.pull(deadline_s) if version is None else self.weights.pull_version(version)
        self.load(self.policy.weights())
        return pulled

    def close(self) -> None:
        self.weights.close()
