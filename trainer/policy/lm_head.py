"""The LM head: logits, and log-probabilities of tokens without a [tokens, vocab] matrix in memory.

Logits are made for some rows at a time, and made again in the backward pass. At any time there are at most two matrices
[rows, vocab]; a third where the entropy has a gradient or logits are soft-capped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact.blocks import products_of
from .exact.operators import BLOCK, ExactOperators

_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
"""Size of one matrix of logits: on a CPU a few of them fit into the caches, on a GPU it keeps the matrix products large."""
_MIN_ROWS = 128
"""Fewer rows would spend the time on reading the weights."""


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """The head as one forward pass uses it: weight [vocab, hidden]. No family has a bias here.

    Logits are the products in `dtype` with sums in fp32, divided by `divisor`, then soft-capped. With `exact`, products and
    log-softmax are those of exact mode.
    """

    weight: Tensor
    dtype: torch.dtype
    exact: ExactOperators | None = None
    divisor: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, vocab] in fp32 of hidden states [T, hidden]. Differentiable."""
        products = _Products.apply(hidden, self.weight, self)
        assert isinstance(products, Tensor)
        return self.scaled(products)

    def token_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, fp32 [T] each, of targets [T] given hidden states [T, hidden]. Differentiable."""
        return _TokenLogprobs.apply(hidden, self.weight, targets, temperature, self)  # pyright: ignore

    def operand(self, tensor: Tensor) -> Tensor:
        """Hidden states or weights, rounded to the type of the products. On a CPU numbers in half precision are held in fp32, since only
        products of fp32 matrices have sums in fp32 there."""
        rounded = tensor.to(self.dtype)
        return rounded if tensor.is_cuda or self.dtype.itemsize > 2 else rounded.float()

    def products(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """fp32 [T, vocab]; both are operands."""
        if self.exact is not None:
            return self.exact.logits(hidden, weight, self.dtype)
        if weight.dtype.itemsize == 2:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        with products_of(self.dtype):
            return F.linear(hidden, weight)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """The log-softmax of logits, fp32 [T, vocab]."""
        return torch.log_softmax(logits, -1) if self.exact is None else self.exact.log_softmax(logits)

    def scaled(self, products: Tensor) -> Tensor:
        """Logits from products."""
        if self.divisor != 1.0:
            products = products / self.divisor
        return products if self.softcap is None else torch.tanh(products / self.softcap) * self.softcap

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """The rows whose logits are in memory at one time."""
        size = _CHUNK_BYTES.get(self.weight.device.type, _CHUNK_BYTES["cuda"]) // (4 * len(self.weight))
        size = max(size // BLOCK * BLOCK, _MIN_ROWS)
        return (slice(start, start + size) for start in range(0, num_rows, size))


class _Gradients:
    """The gradients of hidden states and weight, chunk by chunk, each only if it is asked for."""

    def __init__(self, head: LogitsHead, hidden: Tensor, wanted: tuple[bool, ...]) -> None:
        self._head = head
        self._operand = head.operand(head.weight)
        self._hidden = hidden
        of_hidden, of_weight = wanted[:2]
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        self.weight = torch.zeros_like(head.weight, dtype=torch.float32) if of_weight else None

    def products(self, rows: slice) -> Tensor:
        return self._head.products(self._head.operand(self._hidden[rows]), self._operand)

    def add(self, rows: slice, grad: Tensor) -> None:
        """grad: of the products of these rows, fp32 [rows, vocab]."""
        narrow = grad.to(self._operand.dtype)
        with products_of(self._head.dtype):
            if self.hidden is not None:
                self.hidden[rows] = narrow @ self._operand
            if self.weight is not None:
                self._add_to_weight(narrow.t(), self._head.operand(self._hidden[rows]))

    def _add_to_weight(self, grad: Tensor, hidden: Tensor) -> None:
        """grad [vocab, rows], hidden [rows, hidden]: operands."""
        assert self.weight is not None
        if grad.dtype.itemsize == 2:
            self.weight += torch.mm(grad, hidden, out_dtype=torch.float32)
        else:
            self.weight.addmm_(grad, hidden)

    def found(self) -> tuple[Tensor | None, Tensor | None]:
        return self.hidden, None if self.weight is None else self.weight.to(self._head.weight.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: LogitsHead) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.head = head
        return head.products(head.operand(hidden), head.operand(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        gradients = _Gradients(ctx.head, hidden, ctx.needs_input_grad)
        gradients.add(slice(None), grads[0])
        return *gradients.found(), None


class _TokenLogprobs(torch.autograd.Function):
    """With logits x and p = softmax(x): d log p_target / dx = onehot - p, and d entropy / dx = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, head: LogitsHead
    ) -> tuple[Tensor, Tensor]:
        operand = head.operand(weight)
        count = len(hidden)
        found, entropy, normalizer = (hidden.new_empty(count, dtype=torch.float32) for _ in range(3))
        for rows in head.chunks(count):
            logits = head.scaled(head.products(head.operand(hidden[rows]), operand)).mul_(1 / temperature)
            logprobs = head.log_softmax(logits)
            wanted = targets[rows, None]
            found[rows] = logprobs.gather(1, wanted)[:, 0]
            normalizer[rows] = logits.gather(1, wanted)[:, 0] - found[rows]
            entropy[rows] = -torch.exp(logprobs, out=logits).mul_(logprobs).sum(-1)
        ctx.save_for_backward(hidden, targets, normalizer, entropy)
        ctx.head = head
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets, normalizer, entropy = ctx.saved_tensors
        head: LogitsHead = ctx.head
        of_logprobs, of_entropy = (None if grad is None else grad / (ctx.temperature * head.divisor) for grad in grads)
        gradients = _Gradients(head, hidden, ctx.needs_input_grad)
        for rows in head.chunks(len(hidden)):
            logits = head.scaled(gradients.products(rows))
            slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
            logprobs = logits.mul_(1 / ctx.temperature).sub_(normalizer[rows, None])
            grad = _logits_gradient(logprobs, targets[rows], entropy[rows], *_rows((of_logprobs, of_entropy), rows))
            gradients.add(rows, grad if slope is None else grad.mul_(slope))
        return *gradients.found(), None, None, None


def _rows(tensors: tuple[Tensor | None, Tensor | None], rows: slice) -> tuple[Tensor | None, Tensor | None]:
    first, second = tensors
    return None if first is None else first[rows], None if second is None else second[rows]


def _logits_gradient(
    logprobs: Tensor, targets: Tensor, entropy: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """[T, vocab] from gradients [T] of the targets' log-probabilities and of the entropy; overwrites `logprobs` [T, vocab]."""
    if of_logprobs is None:
        of_logprobs = torch.zeros_like(entropy)
    if of_entropy is None:
        grad = logprobs.exp_().mul_(-of_logprobs[:, None])
    else:
        # -g p - e p (log p + H) = -p (g + e H + e log p)
        probabilities = logprobs.exp()
        grad = logprobs.mul_(of_entropy[:, None]).add_((of_logprobs + of_entropy * entropy)[:, None])
        grad.mul_(probabilities).neg_()
    return grad.scatter_add_(1, targets[:, None], of_logprobs[:, None])
