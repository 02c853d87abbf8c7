"""Rows of a micro-batch as a trie: tokens that rows have in common from their first one on are there once.

Samples of a group share their prompt, the turns of an agent their history, and branches share both. Rows are compared by their tokens
alone. A causal policy computes the same hidden state for a shared token in each of its rows, so one is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Branch(NamedTuple):
    """The part of a row that no row before it has: tokens `start` to `stop` of the trie, after `shared` tokens of earlier branches."""

    row: int
    """The index of the row."""
    shared: int
    start: int
    stop: int


class Stem(NamedTuple):
    """Tokens of one branch that whole later branches continue: keys `keys` of all queries `queries`, both of them ranges of the trie."""

    keys: slice
    queries: slice


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A trie of rows: N tokens in its own order, in which all that continue a token follow it.

    token_ids, positions [N]: each token and its place in its rows. row_nodes [T]: the trie's token for each token of the rows, one row
    after the other. branches: one for each row, in the trie's order; those of rows without a token of their own are empty.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    row_nodes: np.ndarray
    lengths: list[int]
    """Tokens of each row, T in all."""
    branches: list[Branch]
    stems: list[Stem]

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], shortest: int = 1) -> "PrefixTree":
        """The trie of rows of token ids, none of them negative.

        Rows branch where they have at least `shortest` tokens more in common than with others; fewer are in each of them.
        """
        order = sorted(range(len(rows)), key=lambda index: rows[index].astype(">i4").tobytes())
        common = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(order))]
        intervals = _intervals(common, shortest)
        branches: list[Branch] = []
        nodes: dict[int, np.ndarray] = {}
        start = 0
        path = np.zeros(0, np.int64)
        for row, shared in zip(order, common, strict=True):
            stop = start + len(rows[row]) - shared
            path = np.concatenate([path[:shared], np.arange(start, stop)])
            branches.append(Branch(row, shared, start, stop))
            nodes[row] = path
            start = stop
        return cls(
            token_ids=np.concatenate([rows[b.row][b.shared :] for b in branches]),
            positions=np.concatenate([np.arange(b.shared, len(rows[b.row])) for b in branches]),
            row_nodes=np.concatenate([nodes[row] for row in range(len(rows))]),
            lengths=[len(row) for row in rows],
            branches=branches,
            stems=[_stem(branches, *interval) for interval in intervals],
        )

    @property
    def ratio(self) -> float:
        """Tokens of the rows for each token of the trie."""
        return len(self.row_nodes) / len(self.token_ids)

    def path(self, branch: Branch) -> np.ndarray:
        """The trie's token for each token of a branch's row."""
        start = sum(self.lengths[: branch.row])
        return self.row_nodes[start : start + self.lengths[branch.row]]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows have in common from the first one on."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def _intervals(common: list[int], shortest: int) -> list[tuple[int, int, int, int]]:
    """Branches (first, last) that have tokens [low, high) in common, and no others; `common[i]` is that of the branches i - 1 and i.

    Where this is less than `shortest` tokens, `common` is changed so that the branches have only `low` in common.
    """
    found: list[tuple[int, int, int, int]] = []
    stack = [(0, len(common) - 1, 0)]
    while stack:
        first, last, low = stack.pop()
        if first == last:
            continue
        high = min(common[first + 1 : last + 1])
        cuts = [i for i in range(first + 1, last + 1) if common[i] == high]
        if high - low < shortest:
            for cut in cuts:
                common[cut] = low
            high = low
        else:
            found.append((first, last, low, high))
        ends = [cut - 1 for cut in cuts]
        stack += [(a, b, high) for a, b in zip([first, *cuts], [*ends, last], strict=True)]
    return sorted(found)


def _stem(branches: list[Branch], first: int, last: int, low: int, high: int) -> Stem:
    """The stem of the branches `first` to `last`: the first of them has its tokens, and the others whole continue it."""
    owner = branches[first]
    offset = owner.start - owner.shared
    return Stem(slice(offset + low, offset + high), slice(owner.stop, branches[last].stop))
