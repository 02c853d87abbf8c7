"""The built-in learner: an actor with the reference policy, checkpoints, and the publisher of its weights."""

from pathlib import Path

import numpy as np
import torch

from ...comm.fleet import Fleet
from ...comm.recipe import Recipe
from ...relay.queue.batch import Batch
from ...relay.weights.layout import Layout
from ...relay.weights.publisher import WeightPublisher
from ...relay.weights.shards import WeightShard
from ..actor_group import ActorGroup, gather_full
from ..checkpoint import Checkpoints
from ..logprobs import response_logprobs
from ..policy.model import Policy, default_device, load_policy, load_tokenizer, save_policy
from ..policy.tensor_parallel import splits_for
from .actor import Actor


class ActorLearner(Actor):
    """An actor with checkpoints and the publisher of its shard of the weights."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        device = default_device(exact=recipe.generator.exact)
        torch.manual_seed(recipe.run.seed)
        super().__init__(recipe, ActorGroup.join(fleet, recipe.roles.actor, device, recipe.comm.deadline_s))
        self.reference: Policy | None = None
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.checkpoints = Checkpoints(Path(recipe.run.dir), recipe.checkpoint.keep, self.group)
        resume = self.checkpoints.latest() if recipe.run.resume == "auto" else None
        if resume is not None:
            self.checkpoints.load(self.state, resume)
        weights = self.policy.weights()
        layout = Layout.of(weights, recipe.model.dtype, recipe.rollout.tp, splits_for(weights, self.policy.config))
        shard = WeightShard.of(layout, weights, self.group.rank, self.group.size)
        self.publisher = WeightPublisher(fleet, layout, recipe.comm, shard)
        self.num_bytes = layout.num_bytes

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """The initial policy is loaded for the first batch."""
        if self.reference is None:
            self.reference = load_policy(self.recipe.model.path, self.recipe.model.dtype, self.group.device)
            self.group.shard(self.reference)
        return response_logprobs(self.reference, batch, self.group.device, self.recipe)

    def publish(self) -> None:
        self.publisher.publish(self.version, self.policy.weights())

    def export(self) -> str:
        """Write the policy in Hugging Face format; a collective."""
        path = self.checkpoints.path(self.version) / "hf"
        weights = {name: gather_full(tensor.detach()) for name, tensor in self.policy.weights().items()}
        if self.group.is_lead:
            save_policy(self.policy, path, self.tokenizer, weights)
        return str(path)

    def checkpoint(self) -> str:
        self.export()
        return str(self.checkpoints.save(self.state))

    def close(self) -> None:
        self.publisher.close()
        self.group.close()
