"""Attention of the policy: one function registered with transformers, and the attention of training.

transformers' modules call `_dispatch` in every layer. It passes queries, keys and values on to the attention object that was
given to the forward pass: `PackedAttention` in training, paged ones in the generator. So both run the same modules.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "headrace"
"""The attention implementation's name within transformers."""


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
    **_: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None, "the attention object masks by itself"
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    # Some families put the window into the mask only, and keep it in the module.
    window = getattr(module, "sliding_window", None) if sliding_window is None else sliding_window
    spec = AttentionSpec(scaling, window, softcap, s_aux)
    out = attention(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), spec)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, _dispatch)  # pyright: ignore[reportArgumentType]
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # pyright: ignore[reportArgumentType]


class PackedAttention:
    """Causal attention over whole sequences packed one after the other in one row. Differentiable.

    On a GPU in half precision, PyTorch's `varlen_attn`. Elsewhere sequences of similar length (within a factor of two) are
    padded on the right into one batch: the padding comes after every real query, so the causal mask hides it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._longest = max(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._starts = starts.to(device, torch.int32)
        classes: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            classes.setdefault(max(length - 1, 0).bit_length(), []).append(index)
        self._buckets: list[tuple[Tensor, tuple[int, int]]] = []
        inverse = torch.empty(sum(lengths), dtype=torch.long)
        padded = 0
        for members in classes.values():
            longest = max(lengths[i] for i in members)
            offsets = torch.arange(longest)
            sizes = torch.tensor([lengths[i] for i in members])
            tokens = starts[members][:, None] + torch.minimum(offsets[None, :], sizes[:, None] - 1)
            is_real = offsets[None, :] < sizes[:, None]
            inverse[tokens[is_real]] = padded + is_real.flatten().nonzero().flatten()
            self._buckets.append((tokens.flatten().to(device), (len(members), longest)))
            padded += tokens.numel()
        self._inverse = inverse.to(device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and spec.is_plain:
            return self._varlen(query, key, value, spec)
        outputs = []
        for tokens, size in self._buckets:
            q, k, v = (x.index_select(0, tokens).unflatten(0, size).transpose(1, 2) for x in (query, key, value))
            outputs.append(causal_attention(q, k, v, spec).transpose(1, 2).flatten(0, 1))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.index_select(0, self._inverse)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
        starts, longest = self._starts, self._longest
        out = varlen_attn(
            query.contiguous(), key, value, starts, starts, longest, longest, scale=spec.scale, window_size=window
        )
        assert isinstance(out, Tensor)
        return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of the last `q` of `s` positions; query [B, heads, q, d], key and value [B, kv_heads, s, d]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    needs_band = spec.window is not None and num_keys > spec.window
    if spec.is_plain and num_queries == num_keys and not needs_band:
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=spec.scale, enable_gqa=is_grouped
        )
    return masked_attention(query, key, value, band(num_queries, num_keys, spec.window, query.device), spec)


def band(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which key each query sees, bool [num_queries, num_keys]; the last query stands at the last key."""
    distance = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = distance - torch.arange(num_keys, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention under a boolean mask `sees` (broadcast to [B, heads, q, s]), with soft-capping and sinks where `spec` asks for them."""
    groups = query.shape[1] // key.shape[1]
    if spec.is_plain:
        return F.scaled_dot_product_attention(query, key, value, sees, scale=spec.scale, enable_gqa=groups > 1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~sees, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return torch.matmul(weights.to(value.dtype), value)


def rope_table(model: Any, context: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [context, 1, rotary dim] of all positions; the first half of `sin` is negated."""
    cos, sin = model.rotary_emb(torch.empty(1, dtype=dtype, device=device), torch.arange(context, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1)


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer of the Llama line, as transformers' modules choose it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and config.model_type in ("qwen2", "qwen3"):
        return window if kinds[layer] == "sliding_attention" else None
    return window if config.model_type in ("mistral", "phi3") else None
