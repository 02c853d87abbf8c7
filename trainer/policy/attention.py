"""Attention of the policy: one callable registered with transformers, and what it calls.

transformers' modules call `_dispatch` in every layer; it hands queries, keys and values to the attention object that the
caller of the forward pass brought along. Training brings `PackedAttention`, the generator its paged ones: so trainer and
generator run the same modules.
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
    """What one layer asks of its attention."""

    scale: float
    window: int | None = None
    """Keys that a query sees, itself included; None sees all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""


class Attention(Protocol):
    """Attention over tokens [T] of several sequences; it alone knows which token belongs to which."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
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
    **_: Any,
) -> tuple[Tensor, None]:
    assert attention_mask is None, "masks are the attention object's business"
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    rule = AttentionSpec(scaling, sliding_window, softcap)
    out = attention(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), rule)
    return out.unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(NAME, _dispatch)  # pyright: ignore[reportArgumentType]
AttentionMaskInterface.register(NAME, _no_mask)  # pyright: ignore[reportArgumentType]


class PackedAttention:
    """Causal attention over whole sequences that lie one after the other in one packed row. Differentiable.

    On a GPU in half precision, PyTorch's `varlen_attn`. Elsewhere sequences of similar length (within a factor of two) are
    padded on the right into one batch: their padding lies behind every query that counts, so causality alone masks it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.num_tokens = sum(lengths)
        self._longest = max(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._starts = starts.to(device, torch.int32)
        classes: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            classes.setdefault(max(length - 1, 0).bit_length(), []).append(index)
        self._buckets: list[tuple[Tensor, Tensor]] = []
        inverse = torch.empty(self.num_tokens, dtype=torch.long)
        padded = 0
        for members in classes.values():
            longest = max(lengths[i] for i in members)
            offsets = torch.arange(longest)
            sizes = torch.tensor([lengths[i] for i in members])
            tokens = starts[members][:, None] + torch.minimum(offsets[None, :], sizes[:, None] - 1)
            is_real = offsets[None, :] < sizes[:, None]
            inverse[tokens[is_real]] = padded + is_real.flatten().nonzero().flatten()
            self._buckets.append((tokens.flatten().to(device), torch.tensor([len(members), longest])))
            padded += tokens.numel()
        self._inverse = inverse.to(device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        """See `Attention`."""
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and rule.softcap is None:
            return self._varlen(query, key, value, rule)
        outputs = []
        for tokens, shape in self._buckets:
            size = tuple(shape.tolist())
            q, k, v = (x.index_select(0, tokens).unflatten(0, size).transpose(1, 2) for x in (query, key, value))
            outputs.append(causal_attention(q, k, v, rule).transpose(1, 2).flatten(0, 1))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.index_select(0, self._inverse)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        window = (-1, 0) if rule.window is None else (rule.window - 1, 0)
        starts, longest = self._starts, self._longest
        out = varlen_attn(
            query.contiguous(), key, value, starts, starts, longest, longest, scale=rule.scale, window_size=window
        )
        assert isinstance(out, Tensor)
        return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, rule: AttentionSpec) -> Tensor:
    """Attention of the last `q` of `s` positions; query [B, heads, q, d], key and value [B, kv_heads, s, d]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    needs_band = rule.window is not None and num_keys > rule.window
    if rule.softcap is None and num_queries == num_keys and not needs_band:
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rule.scale, enable_gqa=is_grouped
        )
    return masked_attention(query, key, value, band(num_queries, num_keys, rule.window, query.device), rule)


def band(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which key each query sees, bool [num_queries, num_keys]; the last query stands at the last key."""
    distance = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = distance - torch.arange(num_keys, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, rule: AttentionSpec) -> Tensor:
    """Attention under a boolean mask `sees` (broadcast to [B, heads, q, s]), with soft-capping where the rule asks for it."""
    groups = query.shape[1] // key.shape[1]
    if rule.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, sees, scale=rule.scale, enable_gqa=groups > 1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * rule.scale
    scores = torch.tanh(scores / rule.softcap) * rule.softcap
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.matmul(weights.to(value.dtype), value)
