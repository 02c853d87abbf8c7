"""The built-in learner: the policy, gradients by groups of trajectories, clipping, the optimizer step, publishing weights."""

import time
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
from ..algorithms.advantages import group_advantages
from ..algorithms.objective import policy_loss
from ..batch import PADDING_TRAJECTORY, Trajectory, pack
from ..checkpoint import Checkpoints, TrainingState
from ..logprobs import packed_logprobs, response_logprobs
from ..policy.model import Policy, default_device, load_policy, load_tokenizer, save_policy
from ..policy.tensor_parallel import splits_for
from ..step_stats import StepStats


class Actor:
    """fp32 weights, sharded over several ranks; gradients accumulate as groups arrive, and AdamW applies them."""

    def __init__(self, recipe: Recipe, group: ActorGroup) -> None:
        self.recipe = recipe
        self.group = group
        self.policy: Policy = load_policy(recipe.model.path, "float32", group.device, exact=recipe.generator.exact)
        group.shard(self.policy)
        o = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
        )
        self.state = TrainingState(self.policy.model, self.optimizer)
        self.update_s = 0.0

    @property
    def version(self) -> int:
        """The version in training: the number of updates of the weights so far."""
        return self.state.step

    def lr(self) -> float:
        """Learning rate of the next step: linear warm-up, then constant."""
        o = self.recipe.optimizer
        return o.lr * min(1.0, (self.state.step + 1) / (o.warmup_steps + 1))

    def accumulate(self, batch: Batch, stats: StepStats) -> None:
        """Add the gradient of a batch, summed over its micro-batches; a collective of all ranks."""
        started = time.monotonic()
        stats.add(batch)
        advantages = self._advantages(batch)
        for part in batch.micro_batches:
            rows = [Trajectory.of(row, batch.columns[row.key], advantages[row.key]) for row in part]
            self._backward(rows or [PADDING_TRAJECTORY], stats)
        self.update_s += time.monotonic() - started

    def step(self, stats: StepStats) -> dict[str, float]:
        """Scale the accumulated gradient to the mean over the step, clip it, update; returns the optimizer's metrics."""
        started = time.monotonic()
        stats.reduce(self.group)
        lr = self.lr()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # FSDP2 averages the gradients over the ranks; their sum is `size` times larger.
        scale = self.group.size / max(stats.weight, 1.0)
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                parameter.grad *= scale
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.recipe.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        update_s, self.update_s = self.update_s + time.monotonic() - started, 0.0
        return {"actor/grad_norm": float(gather_full(norm)), "actor/lr": lr, "timing_s/update_actor": update_s}

    def _advantages(self, batch: Batch) -> dict[str, float]:
        """By key of the row, for the rows of all ranks: several ranks may share the rows of a group."""
        found: dict[str, float] = {}
        for group in batch.row_batch.groups:
            rewards = torch.tensor(group.rewards)
            values = group_advantages(rewards, scale_by_std=self.recipe.algorithm.scale_by_std).tolist()
            found |= zip((row.key for row in group.rows()), values, strict=True)
        return found

    def _backward(self, part: list[Trajectory], stats: StepStats) -> None:
        batch = pack(part, self.version, self.group.device)
        logprobs, entropy = packed_logprobs(self.policy, batch, self.recipe)
        terms = policy_loss(logprobs, entropy, batch, self.recipe.algorithm)
        terms.loss.backward()
        stats.add_batch(batch, logprobs.detach(), terms)


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

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

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
