"""The gated delta rule (Yang, Kautz, Hatamizadeh, arXiv 2412.06464), and the short convolution before it. Differentiable.

Each head has a state S [key d, value d]. A token with key k, value v, query q, log-decay g and weight b makes it

    S <- exp(g) S + k (b (v - (exp(g) S)^T k))^T        and reads        o = S^T q

with q and k of length 1, and q divided by sqrt(key d). All tensors here are in fp32, or in float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Tokens whose changes of the state are made together, by one triangular system."""
_EPS = 1e-6


def read_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Readings [B, L, heads, value d] of the tokens [B, L], and the state [B, heads, key d, value d] behind the last one.

    query, key [B, L, heads, key d], value [B, L, heads, value d], decay and beta [B, L, heads]. state: before the first token; None is zero.
    A token whose decay and beta are 0 leaves the state as it is.
    """
    length = key.shape[1]
    size = min(_CHUNK, length)
    query, key = _normalised(query, key)
    query, key, value = (_chunks(x, size) for x in (query, key, value))
    decay, beta = (_chunks(x[..., None], size) for x in (decay, beta))
    # Sums reach some hundreds, and differences of them are exponents: in fp32 the factors would be wrong by 1e-4.
    total = decay.double().cumsum(3)
    # The factor between the tokens j and i of a chunk; it may overflow for j > i, which no token reads.
    future = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = (total - total.transpose(3, 4)).to(key.dtype).masked_fill(future, float("-inf")).exp()
    from_start = total.to(key.dtype).exp()
    to_end = (total[..., -1:, :] - total).to(key.dtype).exp()
    keys = key.transpose(3, 4)
    weighted = key * beta
    # The system whose solution is what each token adds to the state, in place of one token after the other.
    system = (weighted @ keys) * between
    changes = torch.cat((value * beta, weighted * from_start), -1)
    solved = torch.linalg.solve_triangular(system, changes, upper=False, unitriangular=True)
    added, read = solved.split((value.shape[-1], key.shape[-1]), -1)
    scores = (query @ keys) * between
    from_state = query * from_start
    to_state = (key * to_end).transpose(3, 4)
    kept = from_start[..., -1:, :]
    outputs = []
    for index in range(key.shape[2]):
        new = added[:, :, index]
        if state is not None:
            new = new - read[:, :, index] @ state
        out = scores[:, :, index] @ new
        change = to_state[:, :, index] @ new
        if state is not None:
            out = out + from_state[:, :, index] @ state
            change = change + kept[:, :, index] * state
        state = change
        outputs.append(out)
    assert state is not None, "a sequence has a token"
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state


def read_one(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The reading of one token of each sequence [B, heads, value d], and its state, which is changed in place.

    query, key [B, heads, key d], value [B, heads, value d], decay and beta [B, heads], state [B, heads, key d, value d].
    """
    size = query.shape[:2]
    query, key = (x.flatten(0, 1)[:, None] for x in _normalised(query, key))
    matrices = state.flatten(0, 1)
    matrices.mul_(decay.exp().flatten()[:, None, None])
    added = torch.baddbmm(value.flatten(0, 1)[:, None], key, matrices, alpha=-1).mul_(beta.flatten()[:, None, None])
    matrices.baddbmm_(key.transpose(1, 2), added)
    return torch.bmm(query, matrices)[:, 0].unflatten(0, size), state


def convolve(inputs: Tensor, weight: Tensor, window: Tensor | None = None) -> Tensor:
    """The causal convolution of each channel, and SiLU: [B, L, channels] of inputs [B, L, channels].

    weight [channels, width]. window [B, width - 1, channels]: the inputs before the first one; None is zero.
    """
    length = inputs.shape[1]
    width = weight.shape[1]
    before = F.pad(inputs, (0, 0, width - 1, 0)) if window is None else torch.cat((window, inputs), 1)
    result = before[:, :length] * weight[:, 0]
    for place in range(1, width):
        result = torch.addcmul(result, before[:, place : place + length], weight[:, place])
    return F.silu(result)


def _normalised(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (query, key))
    return query * query.shape[-1] ** -0.5, key


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, heads, chunks, size, d] of x [B, L, heads, d], with zeros behind the last token."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.transpose(1, 2).unflatten(2, (-1, size))
