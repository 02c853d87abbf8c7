"""Attention over a prefix tree: each query sees its ancestors and itself, by the depth in its rows. Differentiable.

Two ways. On a CPU, for stock attention without a window: products of the queries with each part of their keys, the stems that they
continue and their own branch, merged by the log-sum-exps of the parts, in place of gathered keys and masks. Everywhere else: each
branch's queries over the gathered keys of its whole row, by the kernels of packed rows.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionSpec, band, masked_attention, takes_varlen, varlen_attention
from .device import to_device
from .length_classes import length_classes
from .prefix_tree import Branch, PrefixTree, Stem

# Two private operators of PyTorch take part on a CPU: public ones do not give the log-sum-exp. Written for the schemas of PyTorch 2.13;
# a test holds their results to formulas, so that another version which changes them is noticed.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_FEW_KEYS = 128
"""On a CPU so many keys, or fewer, take plain products: PyTorch's fused kernel needs up to five times as long for them."""
_LOG2_E = 1 / math.log(2)
_SCORES = 1 << 17
"""Scores that plain products make at a time, for each key head: they stay in the cache."""


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
        own = [
            _attend(part.batch(query), part.batch(key), part.batch(value), scale, is_causal=True) for part in classes
        ]
        out, lse = (_unbatched(found, inverse) for found in zip(*own, strict=True))
        for stem in plan.stems:
            keys = _heads(key, stem.keys)
            stem_out, stem_lse = _attend(_heads(query, stem.queries), keys, _heads(value, stem.keys), scale)
            own_lse = lse[stem.queries]
            share = torch.sigmoid(stem_lse[0].t() - own_lse)
            out[stem.queries].lerp_(stem_out[0].transpose(0, 1), share[..., None])
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
        # Of the softmax: what each query's score gradients have in common.
        common = (_wide(grads[0]) * out).sum(-1)
        for part in classes:
            grad, q, k, v, o, sums, products = (part.batch(x) for x in (grads[0], query, key, value, out, lse, common))
            # Padded queries have no gradient, and only they see padded keys.
            is_padded = ~part.is_real[:, None]
            grad.masked_fill_(is_padded[..., None], 0.0)
            products.masked_fill_(is_padded, 0.0)
            own.append(_attend_backward(grad, q, k, v, o, sums, products, ctx.scale, is_causal=True))
        of_query, of_key, of_value = (_unbatched(found, inverse) for found in zip(*own, strict=True))
        for stem in plan.stems:
            grad, q, o, sums, products = (_heads(x, stem.queries) for x in (grads[0], query, out, lse, common))
            k, v = (_heads(x, stem.keys) for x in (key, value))
            found = _attend_backward(grad, q, k, v, o, sums, products, ctx.scale)
            of_query[stem.queries] += found[0][0].transpose(0, 1)
            of_key[stem.keys] += found[1][0].transpose(0, 1)
            of_value[stem.keys] += found[2][0].transpose(0, 1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores, in fp32 at least; query [B, heads, q, d], key and value [B, kv_heads, s, d]."""
    if not _takes_products(query, key, is_causal):
        out, lse = _flash(query, key, value, 0.0, is_causal, scale=scale)
        return _wide(out), lse
    folded = _folded(query, key)
    outs, sums = [], []
    for rows in _chunks(folded, key, is_causal):
        scores = _scores(folded[:, :, rows], key, scale, is_causal)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp2_()
        total = weights.sum(-1, keepdim=True)
        outs.append(_wide(torch.matmul(weights.to(value.dtype), value)).div_(total))
        sums.append(largest.add_(total.log2_()).div_(_LOG2_E))
    return _unfolded(_joined(outs), query), _unfolded(_joined(sums), query)[..., 0]


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    common: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in fp32 at least.

    For the output and the log-sum-exp over all parts; `common`, the product of the output with its gradient. Both [B, heads, q].
    """
    if not _takes_products(query, key, is_causal):
        found = _flash_backward(grad, query, key, value, out, lse, 0.0, is_causal, scale=scale)
        return tuple(_wide(x) for x in found)  # pyright: ignore[reportReturnType]
    grad, folded, lse, common = (_folded(x, key) for x in (grad, query, lse[..., None] * _LOG2_E, common[..., None]))
    of_query = []
    of_key, of_value = (torch.zeros(x.shape, dtype=lse.dtype) for x in (key, value))
    for rows in _chunks(folded, key, is_causal):
        weights = _scores(folded[:, :, rows], key, scale, is_causal).sub_(lse[:, :, rows]).exp2_()
        of_value += torch.matmul(weights.to(grad.dtype).transpose(2, 3), grad[:, :, rows])
        of_scores = _wide(torch.matmul(grad[:, :, rows], value.transpose(2, 3))).sub_(common[:, :, rows])
        narrow = of_scores.mul_(weights).mul_(scale).to(query.dtype)
        of_query.append(_wide(torch.matmul(narrow, key)))
        of_key += torch.matmul(narrow.transpose(2, 3), folded[:, :, rows])
    return _unfolded(_joined(of_query), query), of_key, of_value


def _takes_products(query: Tensor, key: Tensor, is_causal: bool) -> bool:
    """Whether plain products are faster than PyTorch's fused kernel."""
    return key.shape[2] <= _FEW_KEYS and (not is_causal or query.dtype == torch.bfloat16)


def _scores(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Scores for powers of 2, in fp32 at least; query [B, kv_heads, rows, d], key [B, kv_heads, s, d]. Causal ones have all rows of a key head.

    A CPU computes powers of 2 faster than those of e: for hidden keys, whose powers are 0, 20 times.
    """
    scores = _wide(torch.matmul(query, key.transpose(2, 3))).mul_(scale * _LOG2_E)
    if is_causal:
        length = key.shape[2]
        bias = scores.new_zeros(length, length).masked_fill_(~band(length, length, None, key.device), float("-inf"))
        scores.add_(bias.repeat(query.shape[2] // length, 1))
    return scores


def _chunks(folded: Tensor, key: Tensor, is_causal: bool) -> Iterator[slice]:
    """The rows whose scores are made at a time: all of a causal mask, which has few."""
    rows = folded.shape[2] if is_causal else max(1, _SCORES // key.shape[2])
    return (slice(start, start + rows) for start in range(0, folded.shape[2], rows))


def _folded(x: Tensor, key: Tensor) -> Tensor:
    """[B, heads, q, n] with the queries of a key head as one matrix [B, kv_heads, groups * q, n]."""
    return x.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _unfolded(x: Tensor, query: Tensor) -> Tensor:
    return x.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows [B, kv_heads, rows, n] of all chunks."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x


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
    return F.embedding(tokens, _wide(x).flatten(1)).unflatten(1, x.shape[1:]).to(x.dtype)


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """[rows, longest]: each row is padded by its last element."""
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
