"""The actor: gradients of the policy from batches as they arrive, and the updates of a step."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...comm.disk import say
from ...comm.recipe import AlgorithmSettings, Recipe
from ...relay.queue.batch import Batch
from ..actor_group import ActorGroup
from ..algorithms.advantages import open_estimator
from ..algorithms.objective import LossTerms, policy_loss
from ..algorithms.router_loss import load_balancing_loss
from ..batch import PADDING_TRAJECTORY, PackedBatch, Trajectory, TrajectoryBatch, check_tokens, pack, trainable
from ..checkpoint import TrainingState, load_state
from ..logprobs import longest_in_tree, packed_logprobs, response_logprobs
from ..policy.adapter_files import AdapterBase, check_adapter
from ..policy.device import DeviceSums, finish_work, to_device
from ..policy.lora import adapter_weights
from ..policy.routers import recorded_routers
from ..step_metrics import StepMetrics
from .advantages import add_advantages
from .critic import Critic
from .optimizer import Update, Updater, learning_rate
from .start_weights import StartWeights
from .state_copies import StateCopies


class Actor:
    """fp32 weights or an adapter of them, sharded over several ranks.

    Gradients accumulate as groups arrive, and an update follows each part of a step's groups (`batch.updates_per_version`). Rows
    are held only for later passes, and until the step is complete where their advantages need all of it.
    """

    def __init__(self, recipe: Recipe, group: ActorGroup) -> None:
        self.recipe = recipe
        self.group = group
        path = recipe.model.path
        self.adapter_base = AdapterBase.read(path) if group.is_lead and recipe.lora.rank else AdapterBase(path)
        """The weights below the adapter; rank 0 checks and names them."""
        self.policy = group.load(recipe, self.adapter_base)
        if recipe.generator.exact:
            self.policy.make_exact(getattr(torch, recipe.model.compute_type))
        self.longest_in_tree = longest_in_tree(self.policy, recipe)
        """Of new batches; that of saved ones is in them."""
        if recipe.trainer.prefix_tree and group.is_lead and (why := self.policy.rows_alone):
            say(f"trainer.prefix_tree: {why}")
        self.updater = Updater(self.policy, recipe.optimizer)
        self.critic = Critic(recipe, group, self.adapter_base) if recipe.algorithm.advantage == "gae" else None
        critic = None if self.critic is None else (self.critic.model, self.critic.updater.optimizer)
        self.state = TrainingState(self.policy.model, self.updater.optimizer, critic)
        self.copies: StateCopies | None = None
        """Copies of the state in the host's memory, for a trainer whose process is started again."""
        self.needs_whole_step = open_estimator(recipe.algorithm).needs_whole_step
        self.batches: list[TrajectoryBatch] = []
        self.updates: list[Update] = []
        self.start = StartWeights(self.policy)
        self._num_updates = recipe.batch.updates_per_version * recipe.batch.passes
        self._keeps_proximal = self._num_updates > 1 and recipe.algorithm.proximal == "version"
        self._num_groups = 0
        self._totals = DeviceSums()
        """Of loss and weight since the last update, on this rank."""
        self._is_summed = True
        """Whether the ranks have summed all gradients so far."""
        self._update_s = 0.0

    @property
    def version(self) -> int:
        """The version in training: the number of steps so far."""
        return self.state.step

    @property
    def is_frozen(self) -> bool:
        """Whether the step in progress updates the critic alone."""
        return self.critic is not None and self.version < self.recipe.critic.warmup_steps

    def lr(self) -> float:
        """Learning rate of the step in progress."""
        return learning_rate(self.recipe.optimizer, self.version, self.recipe.run.steps)

    def accumulate(self, batch: Batch, stats: StepMetrics) -> None:
        """Train a batch of the step in progress; a collective of all ranks."""
        started = time.monotonic()
        check_tokens(batch, self.policy.vocab_size)
        stats.add(batch)
        taken, num_non_finite = trainable(batch, mask_truncated=self.recipe.algorithm.mask_truncated)
        stats.add_non_finite(num_non_finite)
        stats.shown.add_trajectories(taken)
        if self.critic is not None:
            for row, values in zip(taken.rows, self.critic.values(batch), strict=True):
                row.values = values
        if self.needs_whole_step or self.recipe.batch.passes > 1:
            self.batches.append(taken)
        if not self.needs_whole_step:
            self._add_advantages([taken])
            self._train([taken], stats)
        finish_work(self.group.device)
        self._update_s += time.monotonic() - started

    def step(self, stats: StepMetrics) -> dict[str, float]:
        """Finish the updates of the step; returns their metrics. A collective of all ranks."""
        started = time.monotonic()
        if self.needs_whole_step:
            self._add_advantages(self.batches)
            self._train(self.batches, stats)
        self._end_pass()
        for _ in range(1, self.recipe.batch.passes):
            self._train(self.batches, stats)
            self._end_pass()
        stats.reduce(self.group)
        metrics = {
            "actor/grad_norm": sum(update.grad_norm for update in self.updates) / max(len(self.updates), 1),
            "actor/lr": self.lr(),
            "actor/skipped_updates": float(sum(not update.is_applied for update in self.updates)),
        }
        if self.critic is not None:
            metrics |= self.critic.metrics()
        self.state.step += 1
        self.batches = []
        self.updates = []
        finish_work(self.group.device)
        update_s = self._update_s + time.monotonic() - started
        self._update_s = 0.0
        return metrics | {"timing_s/update_actor": update_s}

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint's folder; a collective. Raises `SettingError` if its content does not fit."""
        if self.recipe.lora.rank:
            adapter = adapter_weights(self.policy.model)
            check_adapter(folder / "adapter", adapter, self.recipe.lora, self.adapter_base)
        line = load_state(self.state, folder, is_alone=self.group.size == 1)
        if line and self.group.is_lead:
            say(line)

    def discard(self) -> None:
        """Forget the step in progress, because the run ends within it. The updates made so far are kept. A collective of all ranks."""
        if self.updates and self.group.is_lead:
            made = f"{len(self.updates)} of the {self._num_updates} updates of step {self.version + 1}"
            say(f"the run ends within a step: the weights include {made}, so a replay will differ")
        self.batches = []
        self.updates = []
        self._num_groups = 0
        self._totals = DeviceSums()
        self.sum_gradients()  # FSDP would add those of this rank to the next sum
        self.updater.discard()
        self.start.drop()
        if self.critic is not None:
            self.critic.discard()

    def _add_advantages(self, batches: Sequence[TrajectoryBatch]) -> None:
        add_advantages(batches, self.recipe.algorithm, self.recipe.sampling.max_new_tokens, self.group)

    def _train(self, batches: Sequence[TrajectoryBatch], stats: StepMetrics) -> None:
        """Accumulate the gradients of batches, and update the weights where a part of the step's groups ends."""
        for batch in batches:
            if self._keeps_proximal and 0 < len(self.updates) < self.recipe.batch.updates_per_version:
                for row, logprobs in zip(batch.rows, self._start_logprobs(batch.batch), strict=True):
                    row.proximal_logprobs = logprobs
            micro_batches = batch.micro_batches()
            for number, rows in enumerate(micro_batches):
                needs_gradient = number < len(micro_batches) - batch.batch.num_forward
                is_updated = bool(self.updates)
                packed = self.pack(batch.batch, rows, is_updated=is_updated)
                stats.add_packed(packed, is_real=bool(rows))
                logprobs = self._backward(packed, stats, needs_gradient=needs_gradient and not self.is_frozen)
                stats.shown.add_logprobs(rows, logprobs)
                if rows and self._keeps_proximal and self.recipe.batch.passes > 1 and not self.updates:
                    for row, own in zip(rows, logprobs.split([len(r.response_ids) for r in rows]), strict=True):
                        row.proximal_logprobs = own.cpu().numpy()
            self._num_groups += len(batch.batch.row_batch.groups)
            if self._num_groups in self.recipe.batch.update_ends[:-1]:
                self._update()

    def pack(self, batch: Batch, rows: list[Trajectory], *, is_updated: bool) -> PackedBatch:
        """A micro-batch of a batch of this rank, which may have no rows."""
        rows = rows or [PADDING_TRAJECTORY]
        longest = self.policy.longest_in_tree if batch.has_trees else 0
        return pack(rows, self.version, self.group.device, is_updated=is_updated, longest_in_tree=longest)

    def _backward(self, batch: PackedBatch, stats: StepMetrics, *, needs_gradient: bool) -> Tensor:
        """Add the gradient of a micro-batch, unless it has none, and its figures; returns its log-probs [R]."""
        with torch.set_grad_enabled(needs_gradient):
            logprobs, terms, router_loss = self._forward(batch, self.recipe.algorithm)
        if router_loss is not None:
            stats.add_router_loss(router_loss)
        if needs_gradient:
            self.add_gradient(terms.loss)
        else:
            self.group.reshard(self.policy)
        self._totals.add(loss=terms.loss.detach(), weight=terms.weight)
        logprobs = logprobs.detach()
        stats.add_batch(batch, logprobs, terms)
        if self.critic is not None:
            self.critic.accumulate(batch)
        return logprobs

    def _forward(self, batch: PackedBatch, algorithm: AlgorithmSettings) -> tuple[Tensor, LossTerms, Tensor | None]:
        """Log-probs [R] of a micro-batch, its loss, and the routers' loss times its weight, which is part of the loss; None without."""
        recipe = self.recipe
        router_coef = algorithm.router_aux_coef
        with recorded_routers(self.policy, is_needed=router_coef > 0) as router_logits:
            logprobs, entropy = packed_logprobs(self.policy, batch, recipe)
        terms = policy_loss(logprobs, entropy, batch, algorithm, recipe.sampling)
        if not router_logits:
            return logprobs, terms, None
        # Of this micro-batch alone: an update has the mean of its micro-batches, by their weights.
        weights = None
        if batch.tree is not None:  # a shared token counts as often as it is in rows
            weights = to_device(torch.from_numpy(np.bincount(batch.tree.row_nodes)), self.group.device)
        router_loss = load_balancing_loss(router_logits, self.policy.widths.passed, weights)
        loss = terms.loss + router_coef * terms.weight * router_loss
        return logprobs, terms._replace(loss=loss), router_loss.detach() * terms.weight

    def _start_logprobs(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs [R] of rows that arrive after the first update, by the policy at the start of the version."""
        with self.start.restored():
            logprobs = response_logprobs(self.policy, batch, self.group.device, self.recipe)
            self.group.reshard(self.policy)
        return logprobs

    def _end_pass(self) -> None:
        self._update()
        self._num_groups = 0
        self.start.drop()

    def _update(self) -> None:
        """Update the weights by the mean gradient since the last update."""
        if self.copies is not None:
            self.copies.before_update()
        if not self.is_frozen:
            self._update_policy()
        self._totals = DeviceSums()
        if self.critic is not None:
            self.critic.update(self.version)

    def add_gradient(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss. Where there is room, the ranks sum theirs later, in `sum_gradients`."""
        self.group.sum_gradients(self.policy, is_wanted=False)
        self._is_summed = not self.group.sums_once
        loss.backward()

    def sum_gradients(self) -> None:
        """Sum over the ranks what micro-batches since the last time have added, by the backward pass of one without rows; a collective.

        It could be part of the last of them, but a rank does not know which one is the last while groups still arrive.
        """
        if not self._is_summed:
            self.group.sum_gradients(self.policy, is_wanted=True)
            empty = pack([PADDING_TRAJECTORY], self.version, self.group.device)
            _, terms, _ = self._forward(empty, self.recipe.algorithm)
            terms.loss.backward()
            self._is_summed = True

    def _update_policy(self) -> None:
        self.sum_gradients()
        if self._keeps_proximal and not self.updates and self.recipe.batch.updates_per_version > 1:
            self.start.keep()
        totals, _ = self._totals.read()
        loss, weight = self.group.all_reduce_sum([totals.get(name, 0.0) for name in ("loss", "weight")])
        # FSDP2 averages the gradients over the ranks; their sum is `size` times larger.
        scale = self.group.size / max(weight, 1.0)
        is_sound = math.isfinite(loss) and weight > 0
        update = self.updater.update(scale, self.lr(), is_sound=is_sound)
        if not update.is_applied and self.group.is_lead:
            cause = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {update.grad_norm}"
            cause = cause if weight else "no token has a loss"
            say(f"step {self.version + 1}: an update of the weights is skipped: {cause}")
        self.updates.append(update)
