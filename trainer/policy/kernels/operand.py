"""Tensors as the kernels of exact mode take them."""

from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton compiles another kernel for a pointer that is not a multiple of this."""


def operand(x: Tensor) -> Tensor:
    """x, contiguous and aligned, so that every launch of a kernel runs the same compiled code; a copy where x is neither."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
