"""A lean forward of the Llama line: the same weights and the same mathematics as transformers' modules, fewer operators.

The modules spend more on small operators than small policies spend on arithmetic. The generator runs this forward where
`LeanDecoder.supports` the policy. Inference only: it works in place.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Rule
from .exact import BLOCK, products_of
from .family import is_llama_line, rope_table, window_of
from .model import Policy


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    rule: Rule


class LeanDecoder:
    """Llama, Qwen2, Qwen3, Mistral and Phi-3 without a bias in the MLP.

    Projections that read the same input run as one. Where their weights lie one after the other in memory the fused one is a
    view of them (`Policy.weights` is ordered so that a flat buffer has them so); elsewhere it is a copy, and `refresh` must
    follow every change of the weights.
    """

    def __init__(self, policy: Policy) -> None:
        assert self.supports(policy)
        self.policy = policy
        model: Any = policy.model.base_model
        self._model = model
        self._num_heads, self._num_kv_heads = policy.num_heads, policy.num_kv_heads
        self._eps: float = policy.config.rms_norm_eps
        self._cos, self._sin = rope_table(model, policy.context, policy.dtype, policy.device)
        self._copies: dict[tuple[int, str], Tensor] = {}
        self.refresh()

    @staticmethod
    def supports(policy: Policy) -> bool:
        """Whether this forward computes what the policy's modules compute."""
        return is_llama_line(policy.config)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the policy's present weights."""
        self.layers = [self._layer(index, layer) for index, layer in enumerate(self._model.layers)]
        self._embedding: Tensor = self._model.embed_tokens.weight
        self._norm: Tensor = self._model.norm.weight

    def _layer(self, index: int, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            qkv, bias, gate_up = attention.qkv_proj.weight, None, mlp.gate_up_proj.weight
        else:
            parts: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
            qkv = self._fused(index, "qkv", [p.weight for p in parts])
            bias = None if parts[0].bias is None else self._fused(index, "bias", [p.bias for p in parts])
            gate_up = self._fused(index, "gate_up", [mlp.gate_proj.weight, mlp.up_proj.weight])
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return _Layer(
            layer.input_layernorm.weight,
            qkv,
            bias,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            attention.o_proj.weight.t(),
            attention.o_proj.bias,
            layer.post_attention_layernorm.weight,
            gate_up,
            mlp.down_proj.weight.t(),
            Rule(attention.scaling, window_of(self.policy.config, index)),
        )

    def _fused(self, index: int, name: str, parts: list[Tensor]) -> Tensor:
        """The parts one below the other: a view if they lie so, else a copy in a place of its own."""
        first = parts[0]
        expected = first.data_ptr()
        for part in parts:
            if part.data_ptr() != expected or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                break
            expected += part.numel() * part.element_size()
        else:
            rows = sum(part.shape[0] for part in parts)
            return first.as_strided((rows, *first.shape[1:]), first.stride())
        if (index, name) not in self._copies:
            self._copies[index, name] = torch.cat(parts)
        return torch.cat(parts, out=self._copies[index, name])

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, hidden] after the last norm, as `Policy.forward` gives them."""
        hidden = F.embedding(token_ids, self._embedding)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        shape, heads = (hidden.shape[-1],), self._num_heads
        rotated = heads + self._num_kv_heads
        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, shape, layer.input_norm, self._eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), rotated + self._num_kv_heads, -1)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, :heads] = F.rms_norm(qkv[:, :heads], layer.q_norm.shape, layer.q_norm, self._eps)
                qkv[:, heads:rotated] = F.rms_norm(qkv[:, heads:rotated], layer.k_norm.shape, layer.k_norm, self._eps)
            _rotate(qkv[:, :rotated], cos, sin)
            mixed = attention(index, qkv[:, :heads], qkv[:, heads:rotated], qkv[:, rotated:], layer.rule)
            hidden.addmm_(mixed.flatten(1), layer.out)
            if layer.out_bias is not None:
                hidden.add_(layer.out_bias)
            normed = F.rms_norm(hidden, shape, layer.post_norm, self._eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            hidden.addmm_(F.silu(gate, inplace=True).mul_(up), layer.down)
        return F.rms_norm(hidden, shape, self._norm, self._eps)


class Head:
    """The LM head of the generator: logits in fp32 whatever the weights' type, as `Policy.logits` gives them.

    On CPU a bfloat16 head is kept in fp32 too and multiplied by bfloat16 products with fp32 sums: inputs and weights are
    bfloat16 numbers, so the products are exact. `refresh` must follow every change of the weights.
    """

    def __init__(self, policy: Policy, is_exact: bool = False) -> None:
        self.policy = policy
        self._is_exact = is_exact
        self._wide: Tensor | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the policy's present weights."""
        self._weight = self.policy.head.weight
        if self._weight.dtype == torch.float32 or self._weight.device.type != "cpu":
            self._wide = self._weight
        elif self._wide is None:
            self._wide = self._weight.float()
        else:
            self._wide.copy_(self._weight)

    def __call__(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits fp32 [B, vocab] of hidden states [B, hidden], written to `out`, whose length is a multiple of BLOCK."""
        wide, softcap, count = self._wide, self.policy.logit_softcap, len(hidden)
        assert wide is not None
        if hidden.device.type != "cpu" and hidden.dtype != torch.float32:
            torch.mm(hidden, wide.t(), out_dtype=torch.float32, out=out[:count])
        else:
            wanted = F.pad(hidden.float(), (0, 0, 0, -count % BLOCK)) if self._is_exact else hidden.float()
            with products_of(self._weight.dtype):
                for rows in range(0, len(wanted), BLOCK if self._is_exact else len(wanted)):
                    block = wanted[rows : rows + BLOCK] if self._is_exact else wanted
                    torch.mm(block, wide.t(), out=out[rows : rows + len(block)])
        logits = out[:count]
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the first dimensions of every head [T, heads, d] in place; `sin` has its first half negated."""
    turned = heads[..., : cos.shape[-1]]
    swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    turned.mul_(cos).addcmul_(swapped, sin)
