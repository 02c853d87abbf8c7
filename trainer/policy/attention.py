"""Attention of the policy: one function registered with transformers, and the attention of training.

transformers' modules call `_dispatch` in every layer. It passes queries, keys and values on to the attention object that was
given to the forward pass: `PackedAttention` in training, paged ones in the generator. So both run the same modules.
"""

from collections.abc import Sequence
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from ...comm.errors import SettingError
from .device import to_device
from .fused_attention import fused_attention, fused_attention_backward
from .length_classes import length_classes

NAME = "headrace"
"""The attention implementation's name within transformers."""
_IGNORED = frozenset(("dropout", "position_ids", "use_cache"))
"""Arguments of an attention function that do not change what is computed here; dropout is refused before."""
_HAS_GROUPS = "enable_gqa" in signature(varlen_attn).parameters  # PyTorch 2.12 and later


class AttentionSpec(NamedTuple):
    """The parameters of one layer's attention."""

    scale: float
    window: int | None = None
    """Keys that a query sees, itself included; None sees all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """A learned score for each head [heads], which the softmax counts as that of one more key, without a value."""

    @property
    def is_plain(self) -> bool:
        """Whether stock attention kernels compute it, up to the window."""
        return self.softcap is None and self.sinks is None


class Attention(Protocol):
    """Attention over tokens [T] of several sequences. The object alone knows which token belongs to which sequence."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, /) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d]."""
        ...


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attention: Attention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None, "the attention object masks by itself"
    if unknown := [name for name, value in others.items() if value is not None and name not in _IGNORED]:
        raise SettingError(f"model.path: attention with {', '.join(unknown)} is not supported")
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    # Some families put the window into the mask only, and keep it in the module.
    window = getattr(module, "sliding_window", None) if sliding_window is None else sliding_window
    spec = AttentionSpec(scaling, window, softcap, s_aux)
    # Under autocast the rotation leaves query and key in fp32, for which a GPU has slow kernels only.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    out = attention(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), spec)
    return out.unsqueeze(0), None


# transformers makes no mask for an attention that registers none; to decide on one it would wait for the device.
AttentionInterface.register(NAME, _dispatch)  # pyright: ignore[reportArgumentType]


def takes_varlen(device: str, dtype: torch.dtype, spec: AttentionSpec) -> bool:
    """Whether `varlen_attention` computes it for tensors of this kind on this type of device."""
    return spec.is_plain and device == "cuda" and dtype in (torch.bfloat16, torch.float16)


class PaddedClasses:
    """Packed sequences as one batch for each class, padded on the right by copies of their last tokens."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.classes: list[tuple[Tensor, tuple[int, int]]] = []
        """For each class its tokens [members * longest], and (members, longest)."""
        self.members: list[list[int]] = length_classes(lengths)
        """The sequences of each class."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        inverse = torch.empty(sum(lengths), dtype=torch.long)
        padded = 0
        for members in self.members:
            sizes = torch.tensor([lengths[index] for index in members])
            longest = int(sizes[0])
            offsets = torch.arange(longest)
            tokens = starts[members][:, None] + torch.minimum(offsets[None, :], sizes[:, None] - 1)
            is_real = offsets[None, :] < sizes[:, None]
            inverse[tokens[is_real]] = padded + is_real.flatten().nonzero().flatten()
            self.classes.append((to_device(tokens.flatten(), device), (len(members), longest)))
            padded += tokens.numel()
        self._inverse = to_device(inverse, device)

    def unpad(self, outputs: list[Tensor]) -> Tensor:
        """[T, ...] of the packed sequences, from [members * longest, ...] of each class."""
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.index_select(0, self._inverse)


class PackedAttention:
    """Causal attention over whole sequences packed one after the other in one row. Differentiable.

    On a GPU in half precision, PyTorch's `varlen_attn`. Elsewhere sequences of about equal length are padded on the right into
    one batch: the padding comes after every real query, so the causal mask hides it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._lengths = lengths
        self._device = device
        self._longest = max(lengths)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if takes_varlen(query.device.type, query.dtype, spec):
            starts = self._device_starts
            return varlen_attention(query, key, value, (starts, starts), (self._longest, self._longest), spec)
        outputs = []
        for tokens, size in self._padded.classes:
            q, k, v = (x.index_select(0, tokens).unflatten(0, size).transpose(1, 2) for x in (query, key, value))
            outputs.append(causal_attention(q, k, v, spec).transpose(1, 2).flatten(0, 1))
        return self._padded.unpad(outputs)

    @cached_property
    def _device_starts(self) -> Tensor:
        starts = torch.tensor([0, *self._lengths]).cumsum(0, dtype=torch.int32)
        return to_device(starts, self._device)

    @cached_property
    def _padded(self) -> PaddedClasses:
        return PaddedClasses(self._lengths, self._device)


class ChunkAttention:
    """Causal attention of the last tokens of several sequences over all their keys; both are packed one after the other."""

    def __init__(self, lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._lengths = list(lengths)
        self._key_lengths = list(key_lengths)
        starts = torch.tensor([[0, *lengths], [0, *key_lengths]], dtype=torch.int32).cumsum(1, dtype=torch.int32)
        self._starts, self._key_starts = starts.to(device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """query [T, heads, d], key and value [S, kv_heads, d] -> [T, heads, d]."""
        if takes_varlen(query.device.type, query.dtype, spec):
            starts = (self._starts, self._key_starts)
            longest = (max(self._lengths), max(self._key_lengths))
            return varlen_attention(query, key, value, starts, longest, spec)
        outputs = []
        parts = (query.split(self._lengths), key.split(self._key_lengths), value.split(self._key_lengths))
        for q, k, v in zip(*parts, strict=True):
            sees = band(len(q), len(k), spec.window, q.device)
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            outputs.append(masked_attention(q, k, v, sees, spec)[0].transpose(0, 1))
        return torch.cat(outputs)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    spec: AttentionSpec,
) -> Tensor:
    """Causal attention by PyTorch's `varlen_attn`, on a GPU in half precision; the last query of a sequence is at its last key.

    query [T, heads, d], key and value [S, kv_heads, d]; `starts` int32 [n + 1] and `longest` are those of queries and of keys.
    """
    options: dict[str, Any] = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _HAS_GROUPS:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
    query, key, value = (x.contiguous() for x in (query, key, value))
    out = varlen_attn(query, key, value, *starts, *longest, scale=spec.scale, window_size=window, **options)
    assert isinstance(out, Tensor)
    return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of the last `q` of `s` positions; query [B, heads, q, d], key and value [B, kv_heads, s, d]."""
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    needs_band = spec.window is not None and num_keys > spec.window
    if spec.is_plain and num_queries == num_keys and not needs_band:
        if query.device.type == "cpu" and query.dtype == torch.bfloat16:
            out = _HalfAttention.apply(query, key, value, spec.scale)
            assert isinstance(out, Tensor)
            return out
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=spec.scale, enable_gqa=is_grouped
        )
    return masked_attention(query, key, value, band(num_queries, num_keys, spec.window, query.device), spec)


class _HalfAttention(torch.autograd.Function):
    """Causal attention of rows alone, in half precision on a CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, lse = fused_attention(query, key, value, scale, is_causal=True)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        found = fused_attention_backward(grads[0], query, key, value, out, lse, ctx.scale, is_causal=True)
        return *(x.to(query.dtype) for x in found), None


def band(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which key each query sees, bool [num_queries, num_keys]; the last query stands at the last key."""
    distance = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = distance - torch.arange(num_keys, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention under a boolean mask `sees` (broadcast to [B, heads, q, s]), with soft-capping and sinks where `spec` asks for them."""
    groups = query.shape[1] // key.shape[1]
    is_grouped = groups > 1 and spec.is_plain and takes_groups(query.device.type)
    if not is_grouped:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    if spec.is_plain:
        return F.scaled_dot_product_attention(query, key, value, sees, scale=spec.scale, enable_gqa=is_grouped)
    scores = torch.matmul(query, key.transpose(2, 3)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~sees, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return torch.matmul(weights.to(value.dtype), value)


def takes_groups(device: str) -> bool:
    """Whether a kernel with a mask takes fewer key heads than query heads.

    On a GPU only the kernel that keeps all scores in fp32 does.
    """
    return device == "cpu"


def rope_table(model: Any, num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [num_rows, 1, rotary dim] of all rows of `rope.RopeRows`; the first half of `sin` is negated."""
    cos, sin = model.rotary_emb(torch.empty(1, dtype=dtype, device=device), torch.arange(num_rows, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1)
