"""The critic of PPO: a value for each token of a response, by a head on a copy of the policy's backbone."""

import math

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ...comm.recipe import Recipe
from ...relay.queue.batch import Batch
from ..actor_group import ActorGroup
from ..algorithms.gae import value_loss
from ..batch import PackedBatch
from ..logprobs import by_row, packed_hidden
from ..policy.adapter_files import AdapterBase
from ..policy.device import DeviceSums
from ..policy.model import Policy
from .optimizer import Update, Updater, learning_rate

_SUMS: tuple[str, ...] = (
    "tokens", "loss", "clipped", "values", "returns", "squared_returns", "errors", "squared_errors",
)  # fmt: skip


class ValueModel(nn.Module):
    """The backbone of a policy with a linear head. Values begin at 0, so that the first steps are plain REINFORCE."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.head = nn.Linear(policy.widths.hidden, 1, bias=False, device=policy.device)
        nn.init.zeros_(self.head.weight)
        if not policy.config.tie_word_embeddings:
            policy.head.weight.requires_grad_(False)


class Critic:
    """Values before the updates of a step, gradients of the value loss, and updates with a learning rate of their own."""

    def __init__(self, recipe: Recipe, group: ActorGroup, adapter_base: AdapterBase) -> None:
        self._recipe = recipe
        self._group = group
        self.model = ValueModel(group.load(recipe, adapter_base))
        group.shard_module(self.model.head)
        self._settings = msgspec.structs.replace(recipe.optimizer, lr=recipe.critic.lr)
        self.updater = Updater(self.model, self._settings)
        self._sums = DeviceSums()
        """Since the last update, on this rank."""
        self._step_sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)
        """Sums of the step in progress, over all ranks."""
        self._updates: list[Update] = []
        self._lr = 0.0

    def values(self, batch: Batch) -> list[np.ndarray]:
        """[R] for each of this rank's rows, of the state before each token of the response; a collective."""
        found = by_row(self.model.policy, batch, self._group.device, self._values)
        self._group.reshard(self.model.policy, self.model.head)
        return found

    def accumulate(self, batch: PackedBatch) -> None:
        """Add the gradient of the value loss of a micro-batch, summed over its tokens; a collective."""
        values = self._values(batch)
        if batch.values is None or batch.returns is None:  # a rank without rows takes part in the collectives
            (values * 0).sum().backward()
            return
        old = batch.values
        returns = batch.returns
        mask = batch.mask
        per_token, is_clipped = value_loss(values, old, returns, self._recipe.critic.clip_value)
        (per_token * mask).sum().backward()
        is_counted = mask > 0
        figures = {
            "tokens": torch.ones_like(mask), "loss": per_token.detach(), "clipped": is_clipped, "values": old, "returns": returns,
            "squared_returns": returns.square(), "errors": returns - old, "squared_errors": (returns - old).square(),
        }  # fmt: skip
        self._sums.add_by_token(**{name: (figure, is_counted) for name, figure in figures.items()})

    def update(self, step: int) -> None:
        """Update the weights by the mean gradient over the tokens since the last update; a collective."""
        own, _ = self._sums.read()  # none, if no micro-batch of this rank had rows
        sums = dict(zip(_SUMS, self._group.all_reduce_sum([own.get(name, 0.0) for name in _SUMS]), strict=True))
        self._lr = learning_rate(self._settings, step, self._recipe.run.steps)
        scale = self._group.size / max(sums["tokens"], 1.0)
        is_sound = math.isfinite(sums["loss"]) and sums["tokens"] > 0
        self._updates.append(self.updater.update(scale, self._lr, is_sound=is_sound))
        self._step_sums = {name: value + sums[name] for name, value in self._step_sums.items()}

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that ends."""
        s = self._step_sums
        n = max(self._step_sums["tokens"], 1.0)
        updates = self._updates
        returns = s["returns"] / n
        error = s["errors"] / n
        variance = s["squared_returns"] / n - returns**2
        found = {
            "critic/vf_loss": s["loss"] / n,
            "critic/vf_clipfrac": s["clipped"] / n,
            "critic/values_mean": s["values"] / n,
            "critic/returns_mean": returns,
            "critic/vf_explained_var": 1 - (s["squared_errors"] / n - error**2) / max(variance, 1e-12),
            "critic/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "critic/skipped_updates": float(sum(not update.is_applied for update in updates)),
            "critic/lr": self._lr,
        }
        self._step_sums = dict.fromkeys(_SUMS, 0.0)
        self._updates = []
        return found

    def discard(self) -> None:
        """Drop the gradients and figures of an unfinished step."""
        self.updater.discard()
        self._sums = DeviceSums()
        self._step_sums = dict.fromkeys(_SUMS, 0.0)
        self._updates = []

    def _values(self, batch: PackedBatch) -> Tensor:
        hidden = packed_hidden(self.model.policy, batch, self._recipe.model.compute_type)
        return self.model.head(hidden.float())[:, 0]
