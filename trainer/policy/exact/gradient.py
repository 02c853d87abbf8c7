"""The gradient of an operator that stock operators do not compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operator = Callable[..., Tensor]


def with_gradient(operator: Operator, stock: Operator, *inputs: Tensor) -> Tensor:
    """`operator` of inputs, with the gradient of `stock`, stock operators that compute the same."""
    if not torch.is_grad_enabled():
        return operator(*inputs)
    return _StockGradient.apply(operator, stock, *inputs)  # pyright: ignore[reportReturnType]


class _StockGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, stock: Operator, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.stock = stock
        return operator(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.stock(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads[0]))
        return None, None, *(next(found) if w else None for w in wanted)
