"""A gated delta net: the parameters of transformers' module, and where its tokens meet the states of their sequences.

transformers' decoder layers call the module in each forward pass, with the attention object that was given to the policy. `install`
lets them call `DeltaNet` instead, which asks that object for what each token reads. So the object alone knows, as for attention,
which token belongs to which sequence: transformers' own forward takes all tokens of a row for one sequence.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention, AttentionSpec
from ..fused_attention import wide_of
from .delta_rule import convolve


class StateShape(NamedTuple):
    """The state of one sequence in one layer."""

    window: tuple[int, int]
    """The last inputs of the convolution [width - 1, channels], in the policy's type."""
    matrices: tuple[int, int, int]
    """The states of the delta rule [heads, key d, value d], in fp32 at least."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a state of a policy of this type."""
        heads, key, value = self.matrices
        return self.window[0] * self.window[1] * dtype.itemsize + heads * key * value * state_type(dtype).itemsize


class Projected(NamedTuple):
    """The projections of tokens [T]."""

    mixed: Tensor
    """[T, channels]: query, key and value before the convolution."""
    gate: Tensor
    """[T, heads, value d]: what is read is normalised and multiplied with its SiLU."""
    decay: Tensor
    """[T, heads] in fp32: the logarithm of the factor of the state."""
    beta: Tensor
    """[T, heads] in fp32: how far a token's value replaces the one that the state has for its key."""


class Recurrence(Protocol):
    """The states of the sequences of tokens [T]."""

    def __call__(self, layer: int, net: "DeltaNet", projected: Projected, /) -> Tensor:
        """The reading of each token in fp32: [T, heads, value d]."""
        ...


class MixedAttention:
    """Attention of the layers that have keys and values, and the recurrence of the others.

    layers: those that have keys and values, where attention counts only them.
    """

    def __init__(self, attention: Attention, recurrence: Recurrence, layers: Iterable[int] = ()) -> None:
        self.attention = attention
        self.recurrence = recurrence
        self._numbers = {layer: number for number, layer in enumerate(layers)}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return self.attention(self._numbers.get(layer, layer), query, key, value, spec)


class DeltaNet:
    """One layer. `module` is transformers', of the Qwen3-Next or the Qwen3.5 line: they differ in how the projections lie."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.layer: int = module.layer_idx
        self._keys = (module.num_k_heads, module.head_k_dim)
        self._values = (module.num_v_heads, module.head_v_dim)
        self._sizes = [module.key_dim, module.key_dim, module.value_dim]
        self.shape = StateShape(
            (module.conv_kernel_size - 1, sum(self._sizes)), (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        )

    def __call__(self, hidden: Tensor, recurrence: Recurrence) -> Tensor:
        """The layer of hidden states [T, hidden] -> [T, hidden]."""
        projected = self._project(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            read = recurrence(self.layer, self, projected)
        gate = projected.gate
        normed = self.module.norm(read.to(gate.dtype).flatten(0, 1), gate.flatten(0, 1))
        return self.module.out_proj(normed.view(len(hidden), -1))

    def convolve(self, mixed: Tensor, window: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key [B, L, heads, key d] and value [B, L, heads, value d] in fp32, of mixed [B, L, channels] behind a window."""
        # In half precision both trainer and generator take rounded weights, as the linear layers do.
        weight = wide_of(self.module.conv1d.weight[:, 0].to(mixed.dtype))
        found = convolve(wide_of(mixed), weight, None if window is None else wide_of(window))
        query, key, value = found.split(self._sizes, -1)
        groups = self._values[0] // self._keys[0]
        query, key = (x.unflatten(-1, self._keys).repeat_interleave(groups, -2) for x in (query, key))
        return query, key, value.unflatten(-1, self._values)

    def _project(self, hidden: Tensor) -> Projected:
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            parts = (module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None])
            query, key, value, gate, b, a = (x[0] for x in module.fix_query_key_value_ordering(*parts))
            mixed = torch.cat([x.flatten(1) for x in (query, key, value)], -1)
        else:
            mixed = module.in_proj_qkv(hidden)
            gate = module.in_proj_z(hidden).unflatten(-1, self._values)
            b = module.in_proj_b(hidden)
            a = module.in_proj_a(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            rate, bias = (wide_of(x.to(a.dtype)) for x in (module.A_log, module.dt_bias))
            decay = -rate.exp() * F.softplus(wide_of(a) + bias)
            return Projected(mixed, gate, decay, wide_of(b).sigmoid())


def state_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the delta rule's states in a policy of this type."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def install(layers: Iterable[nn.Module]) -> dict[int, DeltaNet]:
    """Let decoder layers call `DeltaNet` in place of their modules; returns the nets by the index of their layer."""
    modules: list[Any] = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    nets = {module.layer_idx: DeltaNet(module) for module in modules}
    for module in modules:
        module.forward = partial(_forward, nets[module.layer_idx])
    return nets


def _forward(net: DeltaNet, hidden_states: Tensor, attention: MixedAttention, **_: Any) -> Tensor:
    return net(hidden_states[0], attention.recurrence)[None]
