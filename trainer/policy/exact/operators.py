"""The operators of exact mode: those that sum, and the gate, whose exponential may depend on an element's place in a tensor.

All others are single multiplications and additions of elements, which every device rounds in one way.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..attention import AttentionSpec

PAGE = 64
"""Keys per page."""
BLOCK = 32
"""Rows of every linear layer's call on a CPU."""


class Run(NamedTuple):
    """Tokens [start, stop) of one sequence; its page j of keys is `pages[j]`."""

    start: int
    stop: int
    pages: Sequence[int]


class PagesAttention(Protocol):
    """Causal attention, over pages of keys, of runs of tokens packed one after the other in one row."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, spec: "AttentionSpec", /) -> Tensor:
        """query [T, heads, d], keys and values [pages, kv_heads, PAGE, d] -> [T, heads, d]. Without gradient."""
        ...


class ExactOperators(Protocol):
    """The operators for one kind of device. The result of a row depends on that row alone."""

    rows: int
    """The number of rows of a linear layer's input is a multiple of this."""
    has_tables: bool
    """Whether decoding reads tables of pages on the device, as on a GPU."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in] -> [T, out]. Without gradient."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension of x. Differentiable."""
        ...

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up [T, n]. Differentiable."""
        ...

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """fp32 [T, vocab] of hidden [T, hidden]: products of numbers of `dtype`, sums in fp32. Without gradient.

        On a CPU a weight in fp32 that holds such numbers saves a copy. `out` has rows for T up to a multiple of `rows`.
        """
        ...

    def log_softmax(self, logits: Tensor) -> Tensor:
        """The log-softmax of fp32 [T, vocab]. Without gradient."""
        ...

    def over_pages(self, runs: Sequence[Run], device: torch.device | str) -> PagesAttention:
        """Attention of these runs."""
        ...
