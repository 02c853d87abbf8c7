"""A policy in training by a client: its gradients, its optimizer, and its weights for samplers and for the disk."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.recipe import OptimizerSettings, Recipe
from ...relay.queue.micro_batches import rounds
from ..actor_group import ActorGroup
from ..checkpoint import TrainingState, load_state, save_state, staged
from ..learners.optimizer import Updater
from ..policy.adapter_files import AdapterBase
from ..policy.lora import adapter_weights
from ..policy.model import default_device
from .datum import Datum, check_data
from .losses import TARGETS, TokenLoss, open_loss


class AdamParams(NamedTuple):
    """The parameters of one update; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def check(self) -> None:
        """Raise `SettingError`, which names the field, for a number with which AdamW does not work."""
        for name, value in self._asdict().items():
            is_share = name in ("beta1", "beta2")
            if not math.isfinite(value) or value < 0 or (is_share and value >= 1):
                bound = "at least 0 and below 1" if is_share else "finite, and at least 0"
                raise SettingError(f"adam_params.{name}: must be {bound}, not {value:g}")


class LossResult(NamedTuple):
    """The log-probs of the targets of each datum, float32 [N], and the sum of the loss over all tokens."""

    logprobs: list[np.ndarray]
    loss: float


class TrainedModel:
    """The policy of `recipe.model.path`, of which all weights are trained, or with `recipe.lora.rank` an adapter."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.group = ActorGroup(0, 1, default_device(), recipe.comm.deadline_s, recipe.trainer)
        self.policy = self.group.load(recipe, AdapterBase(recipe.model.path))
        if recipe.generator.exact:
            self.policy.make_exact(getattr(torch, recipe.model.compute_type))
        self.num_data = 0
        """Data whose gradients wait for an update."""
        self._open_optimizer()

    @property
    def num_updates(self) -> int:
        """Updates since the initial weights."""
        return self.state.step

    def accumulate(
        self, data: Sequence[Datum], loss_name: str, settings: Mapping[str, float | str], *, needs_gradient: bool
    ) -> LossResult:
        """Compute the loss of data, and add its gradient to those that wait for an update. Raises `SettingError` for wrong data."""
        loss, values = open_loss(loss_name, settings)
        check_data(data, loss, self.policy.vocab_size, self.policy.context)
        found: dict[int, np.ndarray] = {}
        total = 0.0
        items = [_Item(index, datum) for index, datum in enumerate(data)]
        for ranks in rounds(items, 1, self.recipe.optimizer.micro_batch):
            for part in ranks:
                with torch.set_grad_enabled(needs_gradient):
                    logprobs = self._logprobs([item.datum for item in part])
                    token_losses = loss.formula(logprobs, self._inputs(part, loss), values)
                    summed = token_losses.sum()
                if needs_gradient:
                    summed.backward()
                total += float(summed.detach())
                each = logprobs.detach().float().cpu().split([item.num_tokens for item in part])
                found |= {item.place: own.numpy() for item, own in zip(part, each, strict=True)}
        if needs_gradient:
            self.num_data += len(data)
        return LossResult([found[index] for index in range(len(data))], total)

    def step(self, params: AdamParams) -> dict[str, float]:
        """Update the weights by the sum of the gradients since the last update, which are cleared; returns metrics.

        Raises `SettingError` without data, and where the gradient is not finite: the weights stay as they are.
        """
        params.check()
        if not self.num_data:
            raise SettingError("optim_step: there was no forward_backward since the last one")
        self.num_data = 0
        for group in self.updater.optimizer.param_groups:
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        update = self.updater.update(1.0, params.learning_rate, max_grad_norm=params.grad_clip_norm)
        if not update.is_applied:
            raise SettingError(f"optim_step: the gradient's norm is {update.grad_norm}; the weights stay as they are")
        self.state.step += 1
        return {"grad_norm": update.grad_norm, "learning_rate": params.learning_rate}

    def discard(self) -> None:
        """Forget the gradients that wait for an update."""
        self.num_data = 0
        self.updater.discard()

    def sampler_weights(self) -> dict[str, Tensor]:
        """A copy, in host memory, of the weights that make the policy: those of the adapter in fp32, or all in the type of sampling."""
        if self.recipe.lora.rank:
            return {
                name: matrix.detach().to("cpu", copy=True)
                for name, matrix in adapter_weights(self.policy.model).items()
            }
        dtype = getattr(torch, self.recipe.model.compute_type)
        return {name: weight.detach().to("cpu", dtype, copy=True) for name, weight in self.policy.weights().items()}

    def write(self, folder: Path) -> None:
        """Write weights, moments and the number of updates."""
        save_state(staged(self.state.state_dict()), folder, None)

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Take what `write` wrote; without the optimizer its moments begin anew. Raises `SettingError` for a state of another model."""
        self.discard()
        load_state(self.state, folder, is_alone=True)
        if not with_optimizer:
            self._open_optimizer()

    def _open_optimizer(self) -> None:
        self.updater = Updater(self.policy, OptimizerSettings(max_grad_norm=0.0))
        self.state = TrainingState(self.policy.model, self.updater.optimizer)

    def _logprobs(self, data: Sequence[Datum]) -> Tensor:
        """Log-probs [T] of the targets of data, packed one after the other; as the trainer of a run computes them, at temperature 1."""
        device = self.group.device
        token_ids = torch.from_numpy(np.concatenate([datum.token_ids for datum in data])).long().to(device)
        targets = torch.from_numpy(np.concatenate([datum.inputs[TARGETS] for datum in data])).long().to(device)
        ends = np.cumsum([0, *(datum.num_tokens for datum in data)])
        is_half = self.recipe.model.compute_type == "bfloat16"
        with torch.autocast(
            device.type, torch.bfloat16, enabled=is_half and self.policy.exact is None, cache_enabled=False
        ):
            hidden = self.policy.forward_packed(token_ids, torch.from_numpy(ends).int())
        return self.policy.token_logprobs(hidden, targets, 1.0, torch.bfloat16 if is_half else None)[0]

    def _inputs(self, part: "Sequence[_Item]", loss: TokenLoss) -> dict[str, Tensor]:
        """What a loss reads of packed data, [T] each."""
        return {
            name: torch.from_numpy(np.concatenate([item.datum.inputs[name] for item in part]))
            .float()
            .to(self.group.device)
            for name in loss.inputs
        }


class _Item(NamedTuple):
    """A datum with its place in the request."""

    place: int
    datum: Datum

    @property
    def num_tokens(self) -> int:
        return self.datum.num_tokens
