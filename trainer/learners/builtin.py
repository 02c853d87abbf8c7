"""The built-in learner: the policy, gradients by groups of trajectories, clipping, the optimizer step, publishing weights."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from ...comm.fleet import Fleet
from ...comm.messages.queue import RowRef
from ...comm.recipe import Recipe
from ...relay.checkpoints import CheckpointFolder
from ...relay.queue.batch import Batch
from ...relay.weights.layout import Layout
from ...relay.weights.publisher import WeightPublisher
from ...relay.weights.shards import WeightShard
from ..actor_group import ActorGroup, gather_full
from ..algorithms.advantages import open_estimator
from ..algorithms.objective import policy_loss
from ..algorithms.router_loss import load_balancing_loss
from ..batch import PADDING_TRAJECTORY, Trajectory, loss_mask, pack
from ..checkpoint import TrainingState, load_state, save_state, staged
from ..logprobs import packed_logprobs, response_logprobs
from ..policy.model import Policy, default_device, load_policy, load_tokenizer, save_policy
from ..policy.routers import recorded_routers
from ..policy.tensor_parallel import splits_for
from ..step_stats import StepStats
from .advantages import row_advantages
from .optimizer import Updater, learning_rate


class Actor:
    """fp32 weights, sharded over several ranks; gradients accumulate as groups arrive, and AdamW applies them."""

    def __init__(self, recipe: Recipe, group: ActorGroup) -> None:
        self.recipe = recipe
        self.group = group
        self.policy: Policy = load_policy(
            recipe.model.path, "float32", group.device, exact=recipe.generator.exact, shard=group.shard
        )
        if recipe.trainer.activation_checkpointing is True:
            self.policy.checkpoint_activations()
        self.updater = Updater(self.policy, recipe.optimizer)
        self.state = TrainingState(self.policy.model, self.updater.optimizer)
        self.needs_whole_step = open_estimator(recipe.algorithm).needs_whole_step
        self.held: list[Batch] = []
        self.update_s = 0.0

    @property
    def version(self) -> int:
        """The version in training: the number of updates of the weights so far."""
        return self.state.step

    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.recipe.optimizer, self.version, self.recipe.run.steps)

    def accumulate(self, batch: Batch, stats: StepStats) -> None:
        """Add the gradient of a batch, summed over its micro-batches; a collective of all ranks."""
        started = time.monotonic()
        stats.add(batch)
        self.held.append(batch)
        if not self.needs_whole_step:
            self._train_held(stats)
        self.update_s += time.monotonic() - started

    def step(self, stats: StepStats) -> dict[str, float]:
        """Scale the accumulated gradient to the mean over the step, clip it, update; returns the optimizer's metrics."""
        started = time.monotonic()
        self._train_held(stats)
        stats.reduce(self.group)
        lr = self.lr()
        # FSDP2 averages the gradients over the ranks; their sum is `size` times larger.
        scale = self.group.size / max(stats.weight, 1.0)
        broken = stats.non_finite()
        update = self.updater.update(scale, lr, is_finite=not broken)
        if not update.is_applied and self.group.is_lead:
            cause = f"the gradient's norm is {update.grad_norm}" if not broken else f"{', '.join(broken)} not finite"
            print(f"step {self.version + 1}: the update of the weights is skipped: {cause}", flush=True)
        self.state.step += 1
        update_s, self.update_s = self.update_s + time.monotonic() - started, 0.0
        return {
            "actor/grad_norm": update.grad_norm,
            "actor/lr": lr,
            "actor/skipped_updates": float(not update.is_applied),
            "timing_s/update_actor": update_s,
        }

    def discard(self) -> None:
        """Discard what the step has so far: the run ends within it."""
        self.held = []
        self.updater.discard()

    def _train_held(self, stats: StepStats) -> None:
        """Add the gradients of the batches that are held, which need their advantages first."""
        advantages = row_advantages(self.held, self.recipe, self.group)
        for batch in self.held:
            for part in batch.micro_batches:
                rows = [self._trajectory(row, batch.columns[row.key], advantages[row.key]) for row in part]
                stats.add_trajectories(rows)
                self._backward(rows or [PADDING_TRAJECTORY], stats)
        self.held = []

    def _trajectory(self, row: RowRef, columns: dict[str, np.ndarray], advantages: np.ndarray) -> Trajectory:
        mask = loss_mask(columns, mask_truncated=self.recipe.algorithm.mask_truncated)
        return Trajectory.of(row, columns, advantages, mask)

    def _backward(self, part: list[Trajectory], stats: StepStats) -> None:
        batch = pack(part, self.version, self.group.device)
        router_coef = self.recipe.algorithm.router_aux_coef
        with recorded_routers(self.policy, is_needed=router_coef > 0) as router_logits:
            logprobs, entropy = packed_logprobs(self.policy, batch, self.recipe)
        terms = policy_loss(logprobs, entropy, batch, self.recipe)
        loss = terms.loss
        if router_logits:  # of this micro-batch alone: a step has the mean of its micro-batches, by their weights
            router_loss = load_balancing_loss(router_logits, self.policy.config.num_experts_per_tok)
            loss = loss + router_coef * terms.weight * router_loss
            stats.add_router_loss(router_loss.detach() * terms.weight)
        loss.backward()
        stats.add_batch(batch, logprobs.detach(), terms)


class ActorLearner(Actor):
    """An actor with checkpoints and the publisher of its shard of the weights."""

    def __init__(self, fleet: Fleet, recipe: Recipe) -> None:
        device = default_device(exact=recipe.generator.exact)
        torch.manual_seed(recipe.run.seed)
        super().__init__(
            recipe, ActorGroup.join(fleet, recipe.roles.actor, device, recipe.comm.deadline_s, recipe.trainer)
        )
        self.reference: Policy | None = None
        self.tokenizer = load_tokenizer(recipe.model.path)
        self._checkpoint_team = self.group.clone_for_thread()
        self._staged_version = -1
        weights = self.policy.weights()
        layout = Layout.of(weights, recipe.model.dtype, recipe.rollout.tp, splits_for(weights, self.policy.config))
        shard = WeightShard.of(layout, weights, self.group.rank, self.group.size)
        self.publisher = WeightPublisher(fleet, layout, recipe.comm, shard)
        self.num_bytes = layout.num_bytes

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """The initial policy is loaded for the first batch."""
        if self.reference is None:
            path, group = self.recipe.model.path, self.group
            self.reference = load_policy(path, "float32", group.device, shard=group.shard)
        return response_logprobs(self.reference, batch, self.group.device, self.recipe)

    def publish(self) -> None:
        self.publisher.publish(self.version, self.policy.weights())

    def export(self) -> str:
        """Write the policy in Hugging Face format; a collective."""
        path = CheckpointFolder(Path(self.recipe.run.dir)).path(self.version) / "hf"
        if self._staged_version != self.version:  # else its checkpoint has the export
            self._write_policy(path, self._whole_weights())
        return str(path)

    def stage(self) -> Callable[[Path], None]:
        self._staged_version = self.version
        state, weights = staged(self.state.state_dict()), self._whole_weights()

        def write(folder: Path) -> None:
            self._write_policy(folder / "hf", weights)
            save_state(state, folder, self._checkpoint_team)

        return write

    def restore(self, folder: Path) -> None:
        load_state(self.state, folder, is_alone=self.group.size == 1)

    def _whole_weights(self) -> dict[str, torch.Tensor]:
        """A copy of the policy's weights in rank 0's host memory, one at a time; a collective."""
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.policy.weights().items():
            whole = gather_full(tensor.detach())
            if self.group.is_lead:
                weights[name] = whole.to("cpu", copy=True)
        return weights

    def _write_policy(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        if self.group.is_lead:
            save_policy(self.policy, folder, self.tokenizer, weights)

    def close(self) -> None:
        self.publisher.close()
        self.group.close()
