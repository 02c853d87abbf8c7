"""The project's own engine behind the adapter's protocol: `rollout.engine=builtin`."""

from typing import Any

import torch

from ..comm.fleet import Fleet
from ..relay.weights import Receipt
from ..trainer.model import load_policy, load_tokenizer
from .adapter import GeneratorRecipe
from .engine import Engine
from .prompts import prompt_tokens
from .weights import RolloutWeights


class Adapter(Engine):
    """The engine with a policy whose parameters are views of the rollout's weights."""

    can_migrate = True

    def __init__(self, fleet: Fleet, recipe: GeneratorRecipe) -> None:
        g = recipe.generator
        has_gpu = torch.cuda.is_available() and not g.exact  # exact mode is a promise of the CPU
        device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
        self.tokenizer = load_tokenizer(recipe.model.path)
        policy = load_policy(recipe.model.path, recipe.model.dtype, device, weights=False, exact=g.exact)
        self.weights = RolloutWeights(fleet, policy, recipe.comm, recipe.run.dir)
        super().__init__(
            policy,
            max_running=g.max_running,
            seed=recipe.run.seed,
            kv_gb=g.kv_gb,
            exact=g.exact,
            prefill_tokens=g.prefill_tokens,
            attention=g.attention,
            gpu_share=g.gpu_share,
            tokenizer=self.tokenizer,
        )
        self.context = policy.context
        self.kv_capacity = self.pool.num_pages * self.pool.page_size

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
        receipt = self.weights.pull(deadline_s)
        self.weights_changed()
        return receipt

    def close(self) -> None:
        """Let go of the relay's memory."""
        self.weights.close()
