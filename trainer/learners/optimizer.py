"""The optimizer of one model: AdamW on two groups of parameters, its learning rate, and updates that are sound or skipped."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from ...comm.errors import SettingError
from ...comm.recipe import OptimizerSettings


class Update(NamedTuple):
    """The norm of the gradient before clipping, and whether the weights have changed."""

    grad_norm: float
    is_applied: bool


class Updater:
    """Applies the accumulated gradients of `model`, of which this process may hold a shard."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.optimizer = open_optimizer(model, settings)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_grad_norm = settings.max_grad_norm

    def update(self, scale: float, lr: float, *, is_sound: bool = True, max_grad_norm: float | None = None) -> Update:
        """Scale the gradients, clip their norm, step, and clear them; a collective.

        max_grad_norm: the bound of the norm, 0 for none; None: that of the settings.

        When the norm is not finite, or the caller's loss is not sound (not finite, or a mean over no token), weights and moments stay as
        they are, on all ranks alike: an update without data would still follow its momentum and the weight decay.
        """
        norm = self.norm(scale)
        is_applied = is_sound and math.isfinite(norm)
        if is_applied:
            bound = (self._max_grad_norm if max_grad_norm is None else max_grad_norm) or math.inf
            # One pass over the gradients; the small number is that of PyTorch's own clipping.
            factor = scale * min(1.0, bound / (norm + 1e-6))
            torch._foreach_mul_(self._gradients(), factor)  # pyright: ignore[reportPrivateImportUsage]
            self._set_lr(lr)
            self.optimizer.step()
        self.discard()
        return Update(norm, is_applied)

    def take(self) -> list[Tensor | None]:
        """The accumulated gradients by parameter, and None for one without a gradient. The parameters have none afterwards."""
        found = [parameter.grad for parameter in self._parameters]
        self.discard()
        return found

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """Make these, which `take` gave, the accumulated gradients."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def norm(self, scale: float) -> float:
        """The norm of `scale` times the accumulated gradients; a collective."""
        return scale * _whole(get_total_norm(self._gradients()))

    def _gradients(self) -> list[Tensor]:
        """The accumulated gradients; zeros, where no micro-batch had one: an update by momentum alone."""
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not found:
            self.put(found := [torch.zeros_like(parameter) for parameter in self._parameters])
        return found

    def discard(self) -> None:
        """Clear the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao compiles its step for a tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _whole(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """The rate of step `step` of `num_steps`: that of `transformers.get_scheduler` but for the warm-up.

    The warm-up is lr * (step + 1) / (warmup_steps + 1): transformers' own begins with a step at rate 0, which would publish the
    same weights again.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    name = settings.lr_schedule
    options = {}
    if name == "cosine" and settings.min_lr_ratio:
        name = "cosine_with_min_lr"
        options = {"min_lr_rate": settings.min_lr_ratio}
    schedule = get_scheduler(
        name, SGD([torch.zeros(1)], lr=settings.lr), settings.warmup_steps, num_steps, scheduler_specific_kwargs=options
    )
    assert isinstance(schedule, LambdaLR)
    return settings.lr * schedule.lr_lambdas[0](step)


def open_optimizer(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    """AdamW over the parameters of `model`, without weight decay for norms and biases. Raises SettingError (`optimizer.name`)."""
    decayed = []
    others = []
    for name, parameter in (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ):
        (decayed if decays(name, parameter) else others).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, settings.weight_decay), (others, 0.0))
        if parameters
    ]
    betas = (settings.beta1, settings.beta2)
    return optimizer_class(settings.name)(groups, lr=settings.lr, betas=betas, eps=settings.eps)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, but for biases of experts; vectors are norms, biases and attention sinks."""
    return parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """The class for `optimizer.name`; raises SettingError if its package is not installed."""
    if name == "adamw":
        return partial(AdamW, fused=True)
    try:
        return import_module("torchao.optim").AdamW8bit  # of the 8-bit optimizers the one for FSDP2 shards
    except ImportError as error:
        raise SettingError("optimizer.name: adamw8bit needs the package torchao: pip install torchao") from error
