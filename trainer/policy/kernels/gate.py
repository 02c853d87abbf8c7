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
def _gate_kernel(gate_up, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, n] of gate_up [T, 2n], whose rows are gate and then up; computed in fp32."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    _gate_kernel[(rows, triton.cdiv(columns, BLOCK))](gate_up, out, columns, BLOCK=BLOCK, num_warps=4)
    return out
