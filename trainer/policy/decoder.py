"""A lean forward pass of the Llama line: the weights and the mathematics of transformers' modules with fewer operators.

For small policies the modules spend more time on small operators than on arithmetic. The generator uses this forward pass
where `LeanDecoder.supports` the policy. Inference only: it works in place.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Attention, AttentionSpec, rope_table
from .decode_linear import DecodeLinear
from .exact.blocks import products_of
from .families import is_llama_line, window_of

if TYPE_CHECKING:
    from .exact.operators import ExactOperators
    from .model import Policy


class HeadRule(NamedTuple):
    """How the queries and keys of a layer's projection become those of attention: the norm of each head, then the rotation."""

    cos: Tensor
    """[T, 1, rotary dim], for the first dimensions of a head."""
    sin: Tensor
    """Likewise; its first half is negated."""
    query_norm: Tensor | None
    """The weight of the RMS norm [d]; None: no norm."""
    key_norm: Tensor | None
    eps: float


@runtime_checkable
class ProjectionAttention(Protocol):
    """Attention that also takes a layer's projection as it is, with fewer launches on a GPU."""

    def of_projection(self, layer: int, qkv: Tensor, heads: HeadRule, spec: AttentionSpec, /) -> Tensor:
        """qkv [T, heads + 2 * kv_heads, d] -> [T, heads, d]."""
        ...


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: DecodeLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: DecodeLinear
    post_norm: Tensor
    gate_up: DecodeLinear
    down: DecodeLinear
    spec: AttentionSpec


class LeanDecoder:
    """Llama, Qwen2, Qwen3, Mistral and Phi-3 without a bias in the MLP. Call `refresh` after every change of the weights.

    Of a split policy it computes this rank's part and takes part in the sums over the ranks. On a GPU a layer that decodes is
    ten launches: two norms, four products of which two add to the residual, `kernels.gate`, `kernels.heads` and the two of
    paged attention.
    """

    def __init__(self, policy: "Policy") -> None:
        assert self.supports(policy)
        self.policy = policy
        self.tensor_parallel = policy.tensor_parallel
        self._model: Any = policy.model.base_model
        self._num_heads = policy.num_heads // self.tensor_parallel.size
        self._num_kv_heads = policy.num_kv_heads // self.tensor_parallel.size
        self._eps: float = policy.config.rms_norm_eps
        self._cos, self._sin = rope_table(self._model, policy.rope.count, torch.float32, policy.device)
        self._has_kernels = policy.device.type == "cuda" and find_spec("triton") is not None
        self._is_wide = policy.device.type == "cpu" and policy.dtype.itemsize == 2
        """Whether the residual stream is in fp32 beside products in half precision, as that of the trainer under autocast is. On a GPU it
        would take four launches more for each layer."""
        self.bind()

    @staticmethod
    def supports(policy: "Policy") -> bool:
        """Whether this forward pass computes what the policy's modules compute."""
        return is_llama_line(policy.config)

    @torch.no_grad()
    def bind(self) -> None:
        """Use the tensors that are the policy's parameters now."""
        self.layers = [self._layer(index, layer) for index, layer in enumerate(self._model.layers)]
        self._embedding: Tensor = self._model.embed_tokens.weight.detach()
        self._norm: Tensor = self._model.norm.weight.detach()

    def refresh(self) -> None:
        """Read the changed values of the parameters."""
        for layer in self.layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                matrix.refresh()

    def _layer(self, index: int, layer: Any) -> _Layer:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv, gate_up = _inputs(attention, mlp, self.policy)
        # A bias that follows a sum over ranks is added by one of them.
        out_bias = attention.o_proj.bias if self.tensor_parallel.rank == 0 else None
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in norms)
        return _Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=DecodeLinear(*zip(*qkv, strict=True)),
            q_norm=q_norm,
            k_norm=k_norm,
            out=DecodeLinear([attention.o_proj.weight], [out_bias]),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=DecodeLinear(gate_up),
            down=DecodeLinear([mlp.down_proj.weight]),
            spec=AttentionSpec(attention.scaling, window_of(self.policy.config, index)),
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, hidden] after the last norm, as `Policy.forward` gives them."""
        hidden = F.embedding(token_ids, self._embedding)
        hidden = hidden.float() if self._is_wide else hidden
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        num_heads = self._num_heads + 2 * self._num_kv_heads
        fused = attention if self._has_kernels and isinstance(attention, ProjectionAttention) else None
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normed(hidden, layer.input_norm)).view(len(hidden), num_heads, -1)
            rule = HeadRule(cos, sin, layer.q_norm, layer.k_norm, self._eps)
            if fused is not None:
                mixed = fused.of_projection(index, qkv, rule, layer.spec)
            else:
                mixed = attention(index, *self._split(qkv, rule), layer.spec)
            hidden = self._add(layer.out, hidden, mixed.flatten(1))
            gate_up = layer.gate_up(self._normed(hidden, layer.post_norm))
            hidden = self._add(layer.down, hidden, self._gate(gate_up))
        return self._normed(hidden, self._norm)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """The RMS norm of hidden states [T, hidden], in the weights' type."""
        if self._is_wide:
            return F.rms_norm(hidden, weight.shape, weight.float(), self._eps).to(weight.dtype)
        return F.rms_norm(hidden, weight.shape, weight, self._eps)

    def _split(self, qkv: Tensor, rule: HeadRule) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [T, heads, d] of a projection, which is overwritten."""
        heads = self._num_heads
        rotated = self._num_heads + self._num_kv_heads
        if rule.query_norm is not None and rule.key_norm is not None:
            qkv[:, :heads] = F.rms_norm(qkv[:, :heads], rule.query_norm.shape, rule.query_norm, rule.eps)
            qkv[:, heads:rotated] = F.rms_norm(qkv[:, heads:rotated], rule.key_norm.shape, rule.key_norm, rule.eps)
        _rotate(qkv[:, :rotated], rule.cos, rule.sin)
        return qkv[:, :heads], qkv[:, heads:rotated], qkv[:, rotated:]

    def _gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [T, n] of gate_up [T, 2n]."""
        if self._has_kernels:
            from .kernels.gate import silu_mul  # Triton is installed only where there is a GPU

            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def _add(self, matrix: DecodeLinear, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden plus the product with x, summed over the ranks."""
        if self.tensor_parallel.size == 1:
            return hidden.add_(matrix(x)) if self._is_wide else matrix.add_to(hidden, x)
        return hidden.add_(self.tensor_parallel.all_reduce_sum(matrix(x)))


def _inputs(attention: Any, mlp: Any, policy: "Policy") -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Weights and biases of query, key and value, and the weights of gate and up."""
    if not hasattr(attention, "qkv_proj"):
        qkv = [(m.weight, m.bias) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return qkv, [mlp.gate_proj.weight, mlp.up_proj.weight]
    heads = (policy.num_heads, policy.num_kv_heads, policy.num_kv_heads)
    sizes = [count // policy.tensor_parallel.size * policy.head_dim for count in heads]
    return [(part, None) for part in attention.qkv_proj.weight.split(sizes)], mlp.gate_up_proj.weight.chunk(2)


class Head:
    """The LM head of the generator: logits in fp32 for weights of any type, as `Policy.logits` gives them.

    On a CPU a bfloat16 head is copied to fp32 and multiplied with bfloat16 products and fp32 sums: inputs and weights are
    bfloat16 numbers, so the products are exact. Call `refresh` after every change of the weights.
    """

    def __init__(self, policy: "Policy", exact: "ExactOperators | None" = None) -> None:
        self.policy = policy
        self._exact = exact
        self.bind()

    def bind(self) -> None:
        """Use the tensor that is the head's weight now."""
        self._weight = self.policy.head.weight.detach()
        self._wide = self._weight.t()  # [hidden, vocab]
        is_fp32 = self._weight.dtype == torch.float32
        # Exact mode makes the same call as `Policy.logits`; else an fp32 weight is faster in a transposed copy.
        self._is_copied = self._weight.device.type == "cpu" and not (is_fp32 and self._exact is not None)
        if self._is_copied:
            shape = self._weight.shape
            self._wide = torch.empty(shape[::-1]) if is_fp32 else torch.empty(shape).t()
        self.refresh()

    @property
    def is_bound(self) -> bool:
        """Whether the policy's head is still the tensor that `bind` found."""
        return self._weight.data_ptr() == self.policy.head.weight.data_ptr()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the changed values of the weight."""
        if self._is_copied:
            self._wide.copy_(self._weight.t())

    def __call__(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits fp32 [B, vocab] of hidden states [B, hidden], written to `out`; in exact mode its length is a multiple of the operators' `rows`."""
        softcap = self.policy.logit_softcap
        count = len(hidden)
        if self._exact is not None:
            self._exact.logits(hidden, self._wide.t(), self._weight.dtype, out)
        elif hidden.device.type != "cpu" and hidden.dtype != torch.float32:
            torch.mm(hidden, self._wide, out_dtype=torch.float32, out=out[:count])
        else:
            with products_of(self._weight.dtype):
                torch.mm(hidden.float(), self._wide, out=out[:count])
        logits = out[:count]
        if self.policy.logit_divisor != 1.0:
            logits.div_(self.policy.logit_divisor)
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first dimensions of every head [T, heads, d] in place; the first half of `sin` is negated.

    The products are in fp32, as in the trainer: cos and sin [T, 1, rotary d] rounded to bfloat16 would be another rotation.
    """
    rotated = heads[..., : cos.shape[-1]]
    wide = rotated.float()
    swapped = wide.roll(wide.shape[-1] // 2, -1)
    wide.mul_(cos).addcmul_(swapped, sin)
    if wide.dtype != rotated.dtype:
        rotated.copy_(wide)
