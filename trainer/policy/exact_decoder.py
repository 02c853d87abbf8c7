"""Exact mode: a forward pass whose bits do not depend on the other tokens of a batch.

Generator and trainer run it, on one token or on a whole packed batch, and get the same log-probabilities bit for bit. Three
rules ensure this. Linear layers run on blocks of exactly BLOCK rows: always the same call with the same shape. Attention runs
over pages of PAGE keys, one call per page with query rows padded to a multiple of ROWS, and the pages of a query are merged
in their order. All other operators work row by row. Stock operators throughout; the backward pass is unconstrained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, AttentionSpec, rope_table, window_of
from .lora import LoraLinear

BLOCK = 32
"""Rows of every linear layer's call."""


class ExactDecoder:
    """The Llama line's forward pass by the rules of exact mode; differentiable, out of place."""

    def __init__(self, model: nn.Module, config: Any, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._model: Any = model
        self._config = config
        self._cos, self._sin = rope_table(model, num_rows, dtype, device)

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, hidden] after the last norm, of tokens [T] at positions [T]."""
        count = len(token_ids)
        padding = -count % BLOCK
        hidden = F.embedding(F.pad(token_ids, (0, padding)), self._model.embed_tokens.weight)
        positions = F.pad(positions, (0, padding))
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for index, layer in enumerate(self._model.layers):
            normed = self._norm(hidden, layer.input_layernorm)
            query, key, value = self._projected(layer.self_attn, normed, cos, sin)
            spec = AttentionSpec(layer.self_attn.scaling, window_of(self._config, index))
            mixed = attention(index, query[:count], key[:count], value[:count], spec).flatten(1)
            hidden = hidden + linear(F.pad(mixed, (0, 0, 0, padding)), layer.self_attn.o_proj)
            hidden = hidden + self._mlp(layer.mlp, self._norm(hidden, layer.post_attention_layernorm))
        return self._norm(hidden, self._model.norm)[:count]

    def _projected(self, attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [T, heads, d]; query and key rotated by their positions."""
        if hasattr(attention, "qkv_proj"):
            num_kv_heads = self._config.num_key_value_heads
            heads = (self._config.num_attention_heads, num_kv_heads, num_kv_heads)
            parts = linear(normed, attention.qkv_proj).split([h * attention.head_dim for h in heads], -1)
        else:
            parts = [linear(normed, p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
        if hasattr(attention, "q_norm"):
            query, key = self._norm(query, attention.q_norm), self._norm(key, attention.k_norm)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    @staticmethod
    def _mlp(mlp: Any, normed: Tensor) -> Tensor:
        if hasattr(mlp, "gate_up_proj"):
            gate, up = linear(normed, mlp.gate_up_proj).chunk(2, -1)
        else:
            gate, up = linear(normed, mlp.gate_proj), linear(normed, mlp.up_proj)
        return linear(F.silu(gate) * up, mlp.down_proj)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, norm.weight.shape, norm.weight, self._config.rms_norm_eps)


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """`module` of x [T, in], T a multiple of BLOCK, block by block."""
    if isinstance(module, LoraLinear):
        return module(x, _in_blocks)
    if not torch.is_grad_enabled():
        return _in_blocks(x, module.weight, module.bias)
    return _BlockLinear.apply(x, module.weight, module.bias)  # pyright: ignore[reportReturnType]


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert len(x) % BLOCK == 0
    x = x.contiguous()
    if len(x) == BLOCK:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(block, weight, bias) for block in x.split(BLOCK)])


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _in_blocks(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        return grad @ weight, grad.t() @ x, grad.sum(0) if ctx.has_bias else None


def exact_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits fp32 [T, vocab] of hidden states [T, hidden]: products in the weights' type, sums in fp32, block by block.

    Without gradient.
    """
    padded, wide = F.pad(hidden.float(), (0, 0, 0, -len(hidden) % BLOCK)), weight.float()
    out = padded.new_empty(len(padded), len(weight))
    with products_of(weight.dtype):
        for block, rows in zip(padded.split(BLOCK), out.split(BLOCK), strict=True):
            torch.mm(block, wide.t(), out=rows)
    return out[: len(hidden)]


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """On the CPU, multiply the numbers of fp32 matrices in this type. For bfloat16 numbers the products are exact."""
    settings: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16" if dtype == torch.bfloat16 else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, heads, d] with their first dimensions rotated."""
    size = cos.shape[-1]
    rotated, rest = heads[..., :size], heads[..., size:]
    swapped = rotated.roll(size // 2, -1)
    rotated = rotated * cos + swapped * sin
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
