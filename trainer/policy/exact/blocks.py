"""The operators of exact mode on a CPU, by stock operators: linear layers run on blocks of exactly BLOCK rows.

So each is always the same call with the same shape. `pages.py` has the attention; all others work row by row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .gradient import with_gradient
from .operators import BLOCK, Run
from .pages import TileAttention

_PIECE = 16384
"""Elements of one call of silu, where there are several threads. PyTorch divides a call over them from 32,768 elements on, and an element
at the end of a thread's part has another exponential than one inside."""


class BlockOperators:
    """See `ExactOperators`."""

    rows = BLOCK
    has_tables = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert len(x) % BLOCK == 0
        x = x.contiguous()
        if len(x) == BLOCK:
            return F.linear(x, weight, bias)
        return torch.cat([F.linear(block, weight, bias) for block in x.split(BLOCK)])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return with_gradient(_gated, lambda gate, up: F.silu(gate) * up, gate, up)

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        padded = F.pad(hidden.float(), (0, 0, 0, -len(hidden) % BLOCK))
        wide = weight.float().t()
        out = padded.new_empty(len(padded), len(weight)) if out is None else out[: len(padded)]
        with products_of(dtype):
            for block, rows in zip(padded.split(BLOCK), out.split(BLOCK), strict=True):
                torch.mm(block, wide, out=rows)
        return out[: len(hidden)]

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1)

    def over_pages(self, runs: Sequence[Run], device: torch.device | str) -> TileAttention:
        return TileAttention(runs, device)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.contiguous()
    out = torch.empty_like(gate)
    size = _PIECE if torch.get_num_threads() > 1 else gate.numel()
    for piece, place in zip(gate.view(-1).split(size), out.view(-1).split(size), strict=True):
        torch.ops.aten.silu.out(piece, out=place)
    return out.mul_(up)


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
