"""The LM head: logits, and log-probabilities of tokens without a [tokens, vocab] matrix in memory.

Logits are made for some rows and a part of the vocabulary at a time, and made again in the backward pass. At any time there are at
most two such matrices; a third where the entropy has a gradient or logits are soft-capped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact.blocks import products_of
from .exact.operators import BLOCK, ExactOperators

_CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 512 << 20}
"""Size of one matrix of logits: on a CPU it stays in the cache, on a GPU it keeps the matrix products large."""
_MIN_ROWS = 128
"""Fewer rows of the whole vocabulary would spend the time on reading the weights."""
_PART_ROWS = 1024
"""Rows of a part of the vocabulary, at most."""
_LEAST = torch.finfo(torch.float32).min


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

    def scaled(self, products: Tensor) -> Tensor:
        """Logits from products."""
        if self.divisor != 1.0:
            products = products / self.divisor
        return products if self.softcap is None else torch.tanh(products / self.softcap) * self.softcap

    @property
    def has_parts(self) -> bool:
        """Whether the vocabulary is cut into parts: on a CPU, whose cache does not hold many rows of the whole one.

        The log-softmax of exact mode needs all logits of a row at a time.
        """
        return self.weight.device.type == "cpu" and self.exact is None

    def parts(self, num_rows: int) -> Iterator[slice]:
        """The parts of the vocabulary whose logits are in memory at one time."""
        size = len(self.weight)
        if self.has_parts:
            row_bytes = 4 * max(1, min(num_rows, _PART_ROWS))
            size = max(_CHUNK_BYTES["cpu"] // row_bytes // BLOCK * BLOCK, BLOCK)
        return (slice(start, start + size) for start in range(0, len(self.weight), size))

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """The rows whose logits of a part are in memory at one time."""
        size = _CHUNK_BYTES.get(self.weight.device.type, _CHUNK_BYTES["cuda"]) // (4 * len(self.weight))
        size = _PART_ROWS if self.has_parts else max(size // BLOCK * BLOCK, _MIN_ROWS)
        return (slice(start, start + size) for start in range(0, num_rows, size))


class _Softmax:
    """The sums over the vocabulary of rows [T], from logits part by part (Milakov and Gimelshein, arXiv 1805.02867)."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.peak = torch.full((num_rows,), _LEAST, dtype=torch.float32, device=device)
        self.total, self.weighted = (torch.zeros_like(self.peak) for _ in range(2))
        """Of exp(logit - peak), and of the same times logit - peak."""

    def add(self, rows: slice, logits: Tensor) -> None:
        """logits [rows, a part of the vocabulary] are overwritten."""
        before = self.peak[rows]
        peak = torch.maximum(before, logits.amax(1))
        weights = logits.sub_(peak[:, None]).exp()
        change = before - peak
        shrink = change.exp()
        total = self.total[rows]
        self.weighted[rows] = (self.weighted[rows] + change * total) * shrink + logits.mul_(weights).sum(1)
        self.total[rows] = total * shrink + weights.sum(1)
        self.peak[rows] = peak

    def normalizer(self) -> Tensor:
        """[T]: the log of the sum of exp(logit)."""
        return self.peak + self.total.log()

    def entropy(self) -> Tensor:
        """[T]."""
        return self.total.log() - self.weighted / self.total


class _Targets(NamedTuple):
    """The columns of the targets of some rows in a part of the vocabulary."""

    column: Tensor
    """[rows, 1]; of any in place of one that is not in the part."""
    is_inside: Tensor
    """[rows]."""

    @classmethod
    def of(cls, targets: Tensor, first: int, size: int) -> "_Targets":
        column = targets - first
        return cls(column.clamp(0, size - 1)[:, None], (column >= 0) & (column < size))


class _Gradients:
    """The gradients of hidden states and weight, by rows and parts of the vocabulary, each only if it is asked for."""

    def __init__(self, head: LogitsHead, operand: Tensor, dtype: torch.dtype, wanted: tuple[bool, ...]) -> None:
        """Of hidden states of this type, of which `operand` [T, hidden] was made."""
        self._head = head
        self._operand = operand
        self._dtype = dtype
        of_hidden, of_weight = wanted[:2]
        self.hidden = torch.zeros_like(operand, dtype=torch.float32) if of_hidden else None
        self.weight = torch.zeros_like(head.weight, dtype=torch.float32) if of_weight else None

    def add(self, rows: slice, part: slice, weight: Tensor, grad: Tensor) -> None:
        """grad: of the products of these rows with `weight`, the operand of this part; fp32."""
        narrow = grad.to(weight.dtype)
        with products_of(self._head.dtype):
            if self.hidden is not None:
                self.hidden[rows] += narrow @ weight
            if self.weight is not None:
                self._add_to_weight(self.weight[part], narrow.t(), self._operand[rows])

    def _add_to_weight(self, total: Tensor, grad: Tensor, hidden: Tensor) -> None:
        """total [part, hidden], grad [part, rows], hidden [rows, hidden]; the last two are operands."""
        if grad.dtype.itemsize == 2:
            total += torch.mm(grad, hidden, out_dtype=torch.float32)
        else:
            total.addmm_(grad, hidden)

    def found(self) -> tuple[Tensor | None, Tensor | None]:
        hidden = None if self.hidden is None else self.hidden.to(self._dtype)
        return hidden, None if self.weight is None else self.weight.to(self._head.weight.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: LogitsHead) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.head = head
        return head.products(head.operand(hidden), head.operand(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        head: LogitsHead = ctx.head
        gradients = _Gradients(head, head.operand(hidden), hidden.dtype, ctx.needs_input_grad)
        gradients.add(slice(None), slice(None), head.operand(head.weight), grads[0])
        return *gradients.found(), None


class _TokenLogprobs(torch.autograd.Function):
    """With logits x and p = softmax(x): d log p_target / dx = onehot - p, and d entropy / dx = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, head: LogitsHead
    ) -> tuple[Tensor, Tensor]:
        operand = head.operand(hidden)
        count = len(hidden)
        softmax = _Softmax(count, hidden.device)
        picked, exact = torch.zeros_like(softmax.peak), torch.empty_like(softmax.peak)
        for part in head.parts(count):
            part_weight = head.operand(weight[part])
            for rows in head.chunks(count):
                logits = _over(head.scaled(head.products(operand[rows], part_weight)), temperature)
                places = _Targets.of(targets[rows], part.start, len(part_weight))
                if head.exact is not None:
                    exact[rows] = head.exact.log_softmax(logits).gather(1, places.column)[:, 0]
                picked[rows] += logits.gather(1, places.column)[:, 0].masked_fill(~places.is_inside, 0.0)
                softmax.add(rows, logits)
        found = picked - softmax.normalizer() if head.exact is None else exact
        entropy = softmax.entropy()
        ctx.save_for_backward(hidden, targets, picked - found, entropy)
        ctx.head = head
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets, normalizer, entropy = ctx.saved_tensors
        head: LogitsHead = ctx.head
        of_logprobs, of_entropy = (None if grad is None else grad / (ctx.temperature * head.divisor) for grad in grads)
        operand = head.operand(hidden)
        gradients = _Gradients(head, operand, hidden.dtype, ctx.needs_input_grad)
        for part in head.parts(len(hidden)):
            weight = head.operand(head.weight[part])
            for rows in head.chunks(len(hidden)):
                logits = head.scaled(head.products(operand[rows], weight))
                slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
                logprobs = _over(logits, ctx.temperature).sub_(normalizer[rows, None])
                places = _Targets.of(targets[rows], part.start, len(weight))
                grad = _logits_gradient(logprobs, places, entropy[rows], *_rows((of_logprobs, of_entropy), rows))
                gradients.add(rows, part, weight, grad if slope is None else grad.mul_(slope))
        return *gradients.found(), None, None, None


def _over(logits: Tensor, temperature: float) -> Tensor:
    """Overwrites them."""
    return logits if temperature == 1.0 else logits.mul_(1 / temperature)


def _rows(tensors: tuple[Tensor | None, Tensor | None], rows: slice) -> tuple[Tensor | None, Tensor | None]:
    first, second = tensors
    return None if first is None else first[rows], None if second is None else second[rows]


def _logits_gradient(
    logprobs: Tensor, targets: _Targets, entropy: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """[rows, part] from gradients [rows] of the targets' log-probabilities and of the entropy; overwrites `logprobs` [rows, part]."""
    if of_logprobs is None:
        of_logprobs = torch.zeros_like(entropy)
    if of_entropy is None:
        grad = logprobs.exp_().mul_(-of_logprobs[:, None])
    else:
        # -g p - e p (log p + H) = -p (g + e H + e log p)
        probabilities = logprobs.exp()
        grad = logprobs.mul_(of_entropy[:, None]).add_((of_logprobs + of_entropy * entropy)[:, None])
        grad.mul_(probabilities).neg_()
    return grad.scatter_add_(1, targets.column, (of_logprobs * targets.is_inside)[:, None])
