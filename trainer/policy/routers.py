"""The routers of a mixture of experts: their logits during a forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import __version__ as version

from ...comm.errors import SettingError

if TYPE_CHECKING:
    from .model import Policy


@contextmanager
def recorded_routers(policy: "Policy", is_needed: bool = True) -> "Iterator[list[Tensor]]":
    """A list that gets the logits [T, experts] of each layer's router, with their gradient, while the policy runs inside.

    A layer that activation checkpointing computes again, in the backward pass, is outside: it does not count twice. Raises
    SettingError where transformers does not name the routers of the policy.
    """
    found: list[Tensor] = []
    recorder: Any = getattr(policy.model.base_model, "_can_record_outputs", {}).get("router_logits")

    def record(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        found.append(outputs[recorder.index])

    routers = [m for m in policy.model.modules() if is_needed and recorder and isinstance(m, recorder.target_class)]
    if is_needed and not routers:
        raise SettingError(
            f"algorithm.router_aux_coef: transformers {version} does not name the routers of model type '{policy.config.model_type}'"
        )
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
