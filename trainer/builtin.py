"""The project's own actor behind the adapter's protocol: `trainer.engine=builtin`."""

from pathlib import Path

import numpy as np
import torch

from ..comm.fleet import Fleet
from ..relay.layout import Layout
from ..relay.parts import Part
from ..relay.publisher import WeightPublisher
from ..relay.stream import Batch
from .actor import Actor
from .checkpoint import Checkpoints
from .logprobs import response_logprobs
from .model import Policy, default_device, load_policy, load_tokenizer, save_policy
from .parallel import ActorGroup, whole
from .recipe import TrainerRecipe
from .shard import cuts_of
from .tally import StepTally


class Adapter:
    """An actor, its checkpoints, and the publisher of its part of the weights."""

    def __init__(self, fleet: Fleet, recipe: TrainerRecipe) -> None:
        device = default_device(exact=recipe.generator.exact)
        torch.manual_seed(recipe.run.seed)
        self.group = ActorGroup.join(fleet, recipe.roles.actor, device, recipe.comm.deadline_s)
        self.actor = Actor(recipe, self.group)
        self.recipe = recipe
        self.reference: Policy | None = None
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.checkpoints = Checkpoints(Path(recipe.run.dir), recipe.checkpoint.keep, self.group)
        resume = self.checkpoints.latest() if recipe.run.resume == "auto" else None
        if resume is not None:
            self.checkpoints.load(self.actor.state, resume)
        weights = self.actor.policy.weights()
        cuts = cuts_of(weights, self.actor.policy.config)
        layout = Layout.of(weights, recipe.model.dtype, recipe.rollout.tp, cuts)
        part = Part.of(layout, weights, self.group.rank, self.group.size)
        self.publisher = WeightPublisher(fleet, layout, recipe.comm, part)
        self.num_bytes = layout.num_bytes

    @property
    def version(self) -> int:
        """The version in training."""
        return self.actor.version

    def accumulate(self, batch: Batch, tally: StepTally) -> None:
        """Add the gradient of a batch."""
        self.actor.accumulate(batch, tally)

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """By the initial policy, which is loaded for the first batch."""
        if self.reference is None:
            self.reference = load_policy(self.recipe.model.path, self.recipe.model.dtype, self.group.device)
            self.group.shard(self.reference)
        return response_logprobs(self.reference, batch, self.group.device, self.recipe)

    def step(self, tally: StepTally) -> dict[str, float]:
        """One update of the optimizer."""
        return self.actor.step(tally)

    def discard(self) -> None:
        """Forget the gradient."""
        self.actor.optimizer.zero_grad(set_to_none=True)

    def publish(self) -> None:
        """Returns after one copy of the weights."""
        self.publisher.publish(self.version, self.version, self.actor.policy.weights())

    def export(self) -> str:
        """The policy in Hugging Face form."""
        path = self.checkpoints.path(self.version) / "hf"
        weights = {name: whole(tensor.detach()) for name, tensor in self.actor.policy.weights().items()}
        if self.group.is_lead:
            save_policy(self.actor.policy, path, self.tokenizer, weights)
        return str(path)

    def checkpoint(self) -> str:
        """The export, and DCP's folder beside it."""
        self.export()
        return str(self.checkpoints.save(self.actor.state))

    def close(self) -> None:
        """Deliver what was published, and end the group of ranks."""
        self.publisher.close()
        self.group.leave()
