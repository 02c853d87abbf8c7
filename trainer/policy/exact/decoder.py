"""The forward pass of exact mode.

Generator and trainer run it, on one token or on a whole packed batch, and get the same log-probabilities bit for bit: linear
layers, norms and attention are the operators of `operators.py`, all others work element by element. The backward pass is
unconstrained.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention, AttentionSpec, rope_table
from ..families import Widths, window_of
from ..lora import LoraLinear, Product
from .operators import ExactOperators
from .packed import ExactPackedAttention


def operators_of(device: torch.device) -> ExactOperators:
    """Stock operators on blocks of fixed size on a CPU, batch-invariant Triton kernels elsewhere."""
    if device.type == "cpu":
        from .blocks import BlockOperators

        return BlockOperators()
    from .kernels import KernelOperators  # Triton is installed only where there is a GPU

    return KernelOperators()


class ExactDecoder:
    """The Llama line's forward pass by the rules of exact mode; differentiable, out of place.

    Weights are rounded to `dtype` first, as those of the rollouts are; hidden states are of this type.
    """

    def __init__(self, model: nn.Module, config: Any, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.operators = operators_of(device)
        self._model: Any = model
        self._config = config
        self.dtype = dtype
        self._cos, self._sin = rope_table(model, num_rows, dtype, device)

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, hidden] after the last norm, of tokens [T] at positions [T]."""
        count = len(token_ids)
        padding = -count % self.operators.rows
        hidden = F.embedding(F.pad(token_ids, (0, padding)), self._model.embed_tokens.weight).to(self.dtype)
        positions = F.pad(positions, (0, padding))
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        for index, layer in enumerate(self._model.layers):
            normed = self._norm(hidden, layer.input_layernorm)
            query, key, value = self._projected(layer.self_attn, normed, cos, sin)
            spec = AttentionSpec(layer.self_attn.scaling, window_of(self._config, index))
            mixed = attention(index, query[:count], key[:count], value[:count], spec).flatten(1)
            hidden = hidden + self._linear(F.pad(mixed, (0, 0, 0, padding)), layer.self_attn.o_proj)
            hidden = hidden + self._mlp(layer.mlp, self._norm(hidden, layer.post_attention_layernorm))
        return self._norm(hidden, self._model.norm)[:count]

    def _projected(self, attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [T, heads, d]; query and key rotated by their positions."""
        if hasattr(attention, "qkv_proj"):
            widths = Widths.of(self._config)
            heads = (widths.heads, widths.kv_heads, widths.kv_heads)
            parts = self._linear(normed, attention.qkv_proj).split([h * attention.head_dim for h in heads], -1)
        else:
            parts = [self._linear(normed, p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
        if hasattr(attention, "q_norm"):
            query = self._norm(query, attention.q_norm)
            key = self._norm(key, attention.k_norm)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    def _mlp(self, mlp: Any, normed: Tensor) -> Tensor:
        if hasattr(mlp, "gate_up_proj"):
            gate, up = self._linear(normed, mlp.gate_up_proj).chunk(2, -1)
        else:
            gate = self._linear(normed, mlp.gate_proj)
            up = self._linear(normed, mlp.up_proj)
        return self._linear(self.operators.gate(gate, up), mlp.down_proj)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return self.operators.rms_norm(x, norm.weight.to(self.dtype), self._config.rms_norm_eps)

    def _linear(self, x: Tensor, module: nn.Linear) -> Tensor:
        """`module` of x [T, in]; T is a multiple of the operators' `rows`."""
        if isinstance(module, LoraLinear):
            return module(x, self.operators.linear)
        weight = module.weight.to(self.dtype)
        bias = module.bias
        bias = None if bias is None else bias.to(self.dtype)  # pyright: ignore[reportUnnecessaryComparison]
        if not torch.is_grad_enabled():
            return self.operators.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, self.operators.linear)  # pyright: ignore[reportReturnType]

    def packed_attention(self, lengths: Sequence[int]) -> ExactPackedAttention:
        """The attention of whole sequences of these lengths."""
        return ExactPackedAttention(self.operators, lengths, self._cos.device)


class _Linear(torch.autograd.Function):
    """x W^T + bias by a product of exact mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if of_x else None,
            grad.t() @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, heads, d] with their first dimensions rotated."""
    size = cos.shape[-1]
    rotated = heads[..., :size]
    rest = heads[..., size:]
    swapped = rotated.roll(size // 2, -1)
    rotated = rotated * cos + swapped * sin
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
