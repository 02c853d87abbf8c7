"""The gate of an MLP, silu(gate) * up, in one launch."""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns of one program."""


@triton.jit
def _gate_kernel(gates, ups, out, row_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gates + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, n] of gate_up [T, 2n], whose rows are gate and then up; computed in fp32."""
    gate, up = gate_up.chunk(2, -1)
    return silu_times(gate, up)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up [T, n] of matrices whose rows are equally far apart; computed in fp32. An element depends on no other one."""
    rows, columns = gate.shape
    row_stride = gate.stride(0)
    assert gate.stride() == up.stride() == (row_stride, 1)
    out = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
    _gate_kernel[(rows, triton.cdiv(columns, BLOCK))](gate, up, out, row_stride, columns, BLOCK=BLOCK, num_warps=4)
    return out
