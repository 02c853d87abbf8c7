"""The gated delta rule against its definition, one token after the other in float64, and the convolution against PyTorch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.trainer.policy.recurrent import delta_rule
from headrace.trainer.policy.recurrent.delta_rule import convolve

read_in_chunks: Any = delta_rule.read_in_chunks
read_one: Any = delta_rule.read_one

KEY, VALUE, HEADS = 6, 5, 3


def inputs(batch: int, length: int, seed: int, dtype=torch.float64) -> Any:
    """Query, key, value, decay and beta; the heads forget between hardly and at once."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, length, HEADS, d, generator=generator) for d in (KEY, KEY, VALUE))
    decay = -torch.tensor([1e-3, 0.5, 16.0]) * torch.rand(batch, length, HEADS, generator=generator)
    beta = torch.rand(batch, length, HEADS, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (query, key, value, decay, beta)]


def _definition(query, key, value, decay, beta, state) -> list[Tensor]:
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    outputs = []
    for t in range(query.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], error * beta[:, t, :, None])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) / KEY**0.5)
    return [torch.stack(outputs, 1), state]


by_definition: Any = _definition


def with_gradients(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    outputs = function(*tensors)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    torch.autograd.backward([*outputs], weights)
    found = [*(x.detach() for x in outputs), *(x.grad.clone() for x in tensors if x.grad is not None)]
    for x in tensors:
        x.grad = None
    return found


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunks_are_tokens_one_after_the_other(length):
    for has_state in (False, True):
        tensors = inputs(2, length, seed=length)
        state = torch.randn(2, HEADS, KEY, VALUE, dtype=torch.float64).requires_grad_()
        if has_state:
            tensors.append(state)
        zero = torch.zeros_like(state)
        expected = with_gradients(lambda *x: by_definition(*x[:5], x[5] if len(x) == 6 else zero), tensors)  # noqa: B023
        for ours, theirs in zip(with_gradients(read_in_chunks, tensors), expected, strict=True):
            assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max().clamp(min=1)


def test_in_fp32_a_head_that_forgets_at_once_is_as_exact_as_the_others():
    """The sum of 64 of its logarithms is about -500: differences of such sums in fp32 would be wrong by 3e-5."""
    tensors = inputs(4, 128, seed=1, dtype=torch.float32)
    exact = with_gradients(
        lambda *x: by_definition(*x, torch.zeros(4, HEADS, KEY, VALUE, dtype=torch.float64)),
        [x.detach().double().requires_grad_() for x in tensors],
    )
    for ours, theirs in zip(with_gradients(read_in_chunks, tensors), exact, strict=True):
        for head in range(HEADS):
            one, other = (x.movedim(1 if x.shape[1] == HEADS else 2, 0)[head] for x in (ours, theirs))
            assert (one - other).norm() <= 4e-6 * other.norm()


def test_single_tokens_continue_what_chunks_have_read():
    tensors = [x.detach() for x in inputs(3, 70, seed=5)]
    whole, last = read_in_chunks(*tensors)
    read, state = read_in_chunks(*(x[:, :40] for x in tensors))
    found = [read]
    for t in range(40, 70):
        one, state = read_one(*(x[:, t] for x in tensors), state.clone())
        found.append(one[:, None])
    assert (torch.cat(found, 1) - whole).abs().max() < 1e-12 and (state - last).abs().max() < 1e-12


def test_tokens_without_decay_and_beta_leave_the_state_as_it_is():
    query, key, value, decay, beta = (x.detach() for x in inputs(2, 50, seed=7))
    is_real = (torch.arange(50) < torch.tensor([[20], [50]]))[..., None]
    _, state = read_in_chunks(query, key, value, decay * is_real, beta * is_real)
    _, first = read_in_chunks(*(x[:1, :20] for x in (query, key, value, decay, beta)))
    assert (state[:1] - first).abs().max() < 1e-12


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 9])
def test_a_convolution_behind_a_window_is_that_of_the_whole(cut):
    x, weight = torch.randn(2, 12, 7, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    expected = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=7).transpose(1, 2))
    assert (convolve(x, weight) - expected).abs().max() < 1e-12
    window = F.pad(x, (0, 0, 3, 0))[:, cut : cut + 3]
    assert (convolve(x[:, cut:], weight, window) - expected[:, cut:]).abs().max() < 1e-12
