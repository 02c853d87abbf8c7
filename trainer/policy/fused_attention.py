"""PyTorch's fused attention for CPUs, with the log-sum-exps of the scores and a backward pass of its own."""

import torch
from torch import Tensor

# Two private operators of PyTorch take part on a CPU: public ones give neither the log-sum-exp nor a backward pass of their own. Written for
# the schemas of PyTorch 2.13; a test holds their results to formulas, so that another version which changes them is noticed.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused kernel for CPUs: its output [B, heads, q, d], and the log-sum-exps of the scores [B, heads, q], in fp32 at least.

    query [B, heads, q, d], key and value [B, kv_heads, s, d].
    """
    return _flash(query, key, value, 0.0, is_causal, scale=scale)


def fused_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in fp32 at least.

    In bfloat16 this kernel needs two to eight times as long as in fp32 for up to 128 keys, and as long for 512.
    """
    wide = [wide_of(x) for x in (grad, query, key, value, out)]
    return _flash_backward(*wide, lse, 0.0, is_causal, scale=scale)


def wide_of(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.float() if x.dtype.itemsize == 2 else x
