"""A linear layer whose rows do not depend on the number of rows: fixed tiles, and one loop over the inputs in order.

As in "Defeating Nondeterminism in LLM Inference" (He and Thinking Machines Lab, 2025): no split of the sum, no tuning, no
tile size that follows the number of rows. That number is not specialized either: Triton would compile another kernel for one row.
"""

# Kernels are written in Triton's language, and Triton is installed only where there is a GPU.
# ruff: noqa: ANN001, ANN202
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operand import operand

ROWS = 64
COLUMNS = 64
"""The tile of one program. Tensor cores of sm_90 and later take 64 rows at least."""
GROUP = 16
"""Tiles of rows that read a tile of the weight one after the other, while it is in the cache."""


def inputs_per_iteration(dtype: torch.dtype) -> int:
    """Terms that one iteration adds to each sum."""
    return 32 if dtype == torch.float32 else 64


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, bias, out, rows, columns, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS)
    in_group = GROUP * tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // in_group * GROUP
    size = tl.minimum(tiles - first, GROUP)
    place = tl.program_id(0) % in_group
    row = ((first + place % size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (place // size * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    term = tl.arange(0, INPUTS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inputs, INPUTS):
        is_term = start + term < inputs
        a = tl.load(
            x + row[:, None] * inputs + (start + term)[None, :],
            mask=(row < rows)[:, None] & is_term[None, :],
            other=0.0,
        )
        at = column[:, None] * inputs + (start + term)[None, :]
        b = tl.load(weight + at, mask=(column < columns)[:, None] & is_term[None, :], other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    is_real = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=is_real)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in] of x's type and bias [out] -> [T, out], summed in fp32; in x's type or in that of `out`."""
    assert x.dtype == weight.dtype
    x = operand(x)
    weight = operand(weight)
    rows, inputs = x.shape
    columns = len(weight)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if out is None else out
    assert out.is_contiguous() and out.shape == (rows, columns)
    _linear_kernel[(triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)](
        x, weight, x if bias is None else operand(bias), out, rows, columns, inputs, ROWS=ROWS, COLUMNS=COLUMNS,
        INPUTS=inputs_per_iteration(x.dtype), GROUP=GROUP, HAS_BIAS=bias is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
