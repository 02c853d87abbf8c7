"""Attention of exact mode over whole sequences, for training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionSpec, PackedAttention
from .operators import PAGE, ExactOperators, Run


class ExactPackedAttention:
    """`PackedAttention` in exact mode: forward over pages, backward through the stock kernel."""

    def __init__(self, operators: ExactOperators, lengths: Sequence[int], device: torch.device | str) -> None:
        runs = []
        places = []
        num_pages = 0
        for length in lengths:
            count = -(-length // PAGE)
            runs.append(Run(0, length, range(num_pages, num_pages + count)))
            places += range(num_pages * PAGE, num_pages * PAGE + length)
            num_pages += count
        self._over_pages = operators.over_pages(runs, device)
        self._places = torch.tensor(places, device=device)
        self._num_pages = num_pages
        self.stock = PackedAttention(lengths, device)
        """The same attention by the stock kernels, for the gradient."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return _Exact.apply(query, key, value, spec, self)  # pyright: ignore[reportReturnType]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """The exact result, without an autograd graph."""
        return self._over_pages(query, self._paged(key), self._paged(value), spec)

    def _paged(self, x: Tensor) -> Tensor:
        pages = x.new_zeros(self._num_pages * PAGE, *x.shape[1:]).index_copy_(0, self._places, x)
        return pages.unflatten(0, (-1, PAGE)).transpose(1, 2).contiguous()


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, attention: ExactPackedAttention
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.spec = spec
        ctx.attention = attention
        return attention.forward(query, key, value, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attention.stock(0, *inputs, ctx.spec)
        query, key, value = torch.autograd.grad(out, inputs, grads[0])
        return query, key, value, None, None
