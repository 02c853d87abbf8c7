"""Attention over a prefix tree: each query sees its ancestors and itself, by the depth in its rows. Differentiable.

Two ways. On a CPU, for stock attention without a window: products of the queries with each part of their keys, the stems that they
continue and their own branch, merged by the log-sum-exps of the parts, in place of gathered keys and masks. Everywhere else: each
branch's queries over the gathered keys of its whole row, by the kernels of packed rows.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionSpec, masked_attention, takes_varlen, varlen_attention
from .device import to_device
from .fused_attention import fused_attention, fused_attention_backward, wide_of
from .length_classes import length_classes
from .prefix_tree import Branch, PrefixTree, Stem


class TreeAttention:
    """Attention over the tokens [N] of a prefix tree, in its order."""

    def __init__(self, tree: PrefixTree, device: torch.device | str = "cpu") -> None:
        self._tree = tree
        self._device = torch.device(device)
        self._longest = max(tree.lengths)
        self._branches = [branch for branch in tree.branches if branch.stop > branch.start]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        sees_all = spec.window is None or spec.window >= self._longest
        if query.device.type == "cpu" and spec.is_plain and sees_all:
            merged = _MergedAttention.apply(query, key, value, self, spec.scale)
            assert isinstance(merged, Tensor)
            return merged
        if takes_varlen(query.device.type, query.dtype, spec):
            keys, starts, longest = self._row_keys
            return varlen_attention(query, _rows(key, keys), _rows(value, keys), starts, longest, spec)
        outputs = [self._of_class(part, query, key, value, spec) for part in self._row_classes]
        return torch.cat(outputs).index_select(0, self._row_inverse)

    def _of_class(self, part: "_RowClass", query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[members * queries, heads, d] of a class of branches, padding included."""
        q = query.index_select(0, part.queries.flatten()).unflatten(0, part.queries.shape).transpose(1, 2)
        k, v = (_rows(x, part.keys.flatten()).unflatten(0, part.keys.shape).transpose(1, 2) for x in (key, value))
        distance = part.depths[:, :, None] - torch.arange(part.keys.shape[1], device=query.device)
        sees = (distance >= 0) if spec.window is None else (distance >= 0) & (distance < spec.window)
        return masked_attention(q, k, v, sees[:, None], spec).transpose(1, 2).flatten(0, 1)

    @cached_property
    def _row_keys(self) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
        """The keys of each branch's row, one row after the other; where the branches' queries and keys start; the longest of both."""
        paths = [self._tree.path(branch) for branch in self._branches]
        sizes = np.array([[b.stop - b.start, len(path)] for b, path in zip(self._branches, paths, strict=True)])
        starts = np.concatenate([np.zeros((1, 2), np.int64), sizes.cumsum(0)]).astype(np.int32)
        on_device = to_device(torch.from_numpy(starts.T.copy()), self._device)
        keys = to_device(torch.from_numpy(np.concatenate(paths)), self._device)
        return keys, (on_device[0], on_device[1]), (int(sizes[:, 0].max()), int(sizes[:, 1].max()))

    @cached_property
    def _row_classes(self) -> list["_RowClass"]:
        lengths = [self._tree.lengths[branch.row] for branch in self._branches]
        by_length = [[self._branches[i] for i in members] for members in length_classes(lengths)]
        return [
            self._row_class([similar[i] for i in members])
            for similar in by_length
            for members in length_classes([branch.stop - branch.start for branch in similar])
        ]

    def _row_class(self, branches: list[Branch]) -> "_RowClass":
        queries = _padded([np.arange(branch.start, branch.stop) for branch in branches])
        keys = _padded([self._tree.path(branch) for branch in branches])
        depths = self._tree.positions[queries]
        return _RowClass(*(to_device(torch.from_numpy(x), self._device) for x in (queries, keys, depths)))

    @cached_property
    def _row_inverse(self) -> Tensor:
        """For each token of the tree its place in the classes."""
        queries = np.concatenate([part.queries.cpu().numpy().ravel() for part in self._row_classes])
        inverse = np.empty(len(self._tree.token_ids), np.int64)
        # A padded branch repeats its last query. Of equal indices the last assignment stays, so from behind that is the first place.
        inverse[queries[::-1]] = np.arange(len(queries))[::-1]
        return to_device(torch.from_numpy(inverse), self._device)

    @cached_property
    def own(self) -> tuple[list["_OwnClass"], Tensor]:
        """Branches of about equal length, padded into one batch each; for each token of the tree its place in them."""
        found: list[_OwnClass] = []
        inverse = np.empty(len(self._tree.token_ids), np.int64)
        num_padded = 0
        for members in length_classes([branch.stop - branch.start for branch in self._branches]):
            tokens = _padded([np.arange(self._branches[i].start, self._branches[i].stop) for i in members])
            is_real = np.ones(tokens.shape, bool)
            is_real[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
            inverse[tokens[is_real]] = num_padded + is_real.ravel().nonzero()[0]
            found.append(_OwnClass(torch.from_numpy(tokens), torch.from_numpy(is_real)))
            num_padded += tokens.size
        return found, torch.from_numpy(inverse)

    @property
    def stems(self) -> list[Stem]:
        """The parts that branches share."""
        return [stem for stem in self._tree.stems if stem.queries.stop > stem.queries.start]


class _RowClass(NamedTuple):
    """Branches whose queries, and whose rows, have about equal lengths: indices of tokens, padded by each row's last one."""

    queries: Tensor
    """[members, longest]."""
    keys: Tensor
    """[members, longest row]."""
    depths: Tensor
    """Of the queries."""


class _OwnClass(NamedTuple):
    """Branches of about equal length: the indices of their tokens [members, longest], and which of them are not padding."""

    tokens: Tensor
    is_real: Tensor

    def batch(self, x: Tensor) -> Tensor:
        """[members, heads, longest, ...] of x [N, heads, ...], one copy."""
        heads = torch.arange(x.shape[1])
        rows = self.tokens[:, None, :] * x.shape[1] + heads[:, None]
        return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)


class _MergedAttention(torch.autograd.Function):
    """Attention as a mean over parts of the keys, weighted by their sums of exponentials.

    For parts i with outputs o_i and log-sum-exps l_i of their scores, l = log(sum of exp l_i) and o = sum of exp(l_i - l) o_i. In the
    backward pass each part has the gradients of a whole attention with the output o and the log-sum-exp l (Dao et al., arXiv 2205.14135, appendix B.2).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: TreeAttention, scale: float) -> Tensor:
        classes, inverse = plan.own
        own: list[tuple[Tensor, Tensor]] = []
        for part in classes:
            q, k, v = (part.batch(x) for x in (query, key, value))
            own.append(fused_attention(q, k, v, scale, is_causal=True))
        out, lse = (wide_of(_unbatched(found, inverse)) for found in zip(*own, strict=True))
        for stem in plan.stems:
            q, k, v = _heads(query, stem.queries), _heads(key, stem.keys), _heads(value, stem.keys)
            stem_out, stem_lse = fused_attention(q, k, v, scale, is_causal=False)
            own_lse = lse[stem.queries]
            share = torch.sigmoid(stem_lse[0].t() - own_lse)
            out[stem.queries].lerp_(wide_of(stem_out[0].transpose(0, 1)), share[..., None])
            lse[stem.queries] = torch.logaddexp(own_lse, stem_lse[0].t())
        out = out.to(value.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan = plan
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan: TreeAttention = ctx.plan
        classes, inverse = plan.own
        own: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in classes:
            grad, q, k, v, o, sums = (part.batch(x) for x in (grads[0], query, key, value, out, lse))
            # Padded queries have no gradient, and only they see padded keys.
            grad.masked_fill_(~part.is_real[:, None, :, None], 0.0)
            own.append(fused_attention_backward(grad, q, k, v, o, sums, ctx.scale, is_causal=True))
        of_query, of_key, of_value = (_unbatched(found, inverse) for found in zip(*own, strict=True))
        for stem in plan.stems:
            grad, q, o, sums = (_heads(x, stem.queries) for x in (grads[0], query, out, lse))
            k, v = (_heads(x, stem.keys) for x in (key, value))
            found = fused_attention_backward(grad, q, k, v, o, sums, ctx.scale, is_causal=False)
            of_query[stem.queries] += found[0][0].transpose(0, 1)
            of_key[stem.keys] += found[1][0].transpose(0, 1)
            of_value[stem.keys] += found[2][0].transpose(0, 1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _unbatched(classes: Sequence[Tensor], inverse: Tensor) -> Tensor:
    """[N, heads, ...] of [members, heads, longest, ...] for each class."""
    return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in classes]).index_select(0, inverse)


def _heads(x: Tensor, tokens: slice) -> Tensor:
    """[1, heads, tokens, ...] of [N, heads, ...]."""
    return x[tokens].transpose(0, 1)[None]


def _rows(x: Tensor, tokens: Tensor) -> Tensor:
    """x[tokens] for x [N, heads, d], many of the tokens several times.

    Its gradient is added up in one order on all devices, and in fp32 at least: in bfloat16 the sum of a large group loses bits.
    """
    return F.embedding(tokens, wide_of(x).flatten(1)).unflatten(1, x.shape[1:]).to(x.dtype)


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """[rows, longest]: each row is padded by its last element."""
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
