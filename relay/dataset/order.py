"""The order in which groups take the rows: the position in the data is one integer, the cursor."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...comm.messages.base import GroupId
from .rows import DatasetRows


class PromptSource(Protocol):
    """Names the group of each position, and has its row."""

    sizes: tuple[int, ...]
    """Rows of each set; the order of the data follows from them."""
    whole_turn: int
    """Any so many positions one after the other have each prompt among them."""

    def group_at(self, cursor: int) -> GroupId:
        """The group that the `cursor`-th first lease starts."""
        ...

    def row(self, group: GroupId) -> bytes:
        """The row of a group, as JSON. Raises `SettingError` if it cannot be read any more."""
        ...


class PromptPool(PromptSource):
    """Deals out rows by a cursor: the position in the data is one integer.

    The order of an epoch is a permutation drawn from (seed, epoch), so cursor and seed alone determine what comes next.
    """

    def __init__(self, rows: DatasetRows, *, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.arange(len(rows)))
        self.sizes = (len(rows),)
        self.whole_turn = 2 * len(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def group_at(self, cursor: int) -> GroupId:
        epoch, index = divmod(cursor, len(self._rows))
        if self._shuffle and self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)))
        return GroupId(epoch, int(self._order[1][index]))

    def row(self, group: GroupId) -> bytes:
        return self._rows[group.prompt]


class MixedPrompts(PromptSource):
    """Several pools in given shares. Each has its own epochs; its rows are numbered after those of the pools before it.

    A round is as many prompts as there are rows, or more where a pool's share of those would be none. It gives each pool its share,
    rounded, in an order drawn from (seed, round), so cursor and seed alone determine what comes next.
    """

    def __init__(self, pools: Sequence[PromptPool], weights: Sequence[float], seed: int) -> None:
        self._pools = pools
        self._starts = np.cumsum([0, *map(len, pools)])
        self._seed = seed
        parts = np.array(weights, float) / sum(weights)
        self._shares = _rounded(parts, self.num_rows)
        if (self._shares[parts > 0] == 0).any():
            self._shares = _rounded(parts, math.ceil(2 / parts[parts > 0].min()))
        self._order: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))
        self.sizes = tuple(map(len, pools))
        rounds = (math.ceil(pool.whole_turn / share) for pool, share in zip(pools, self._shares, strict=True) if share)
        self._round_size = int(self._shares.sum())
        self.whole_turn = (max(rounds) + 1) * self._round_size

    @property
    def num_rows(self) -> int:
        """Rows of all pools."""
        return int(self._starts[-1])

    def group_at(self, cursor: int) -> GroupId:
        number, place = divmod(cursor, self._round_size)
        if self._order[0] != number:
            self._order = (number, *self._round(number))
        source = int(self._order[1][place])
        group = self._pools[source].group_at(number * int(self._shares[source]) + int(self._order[2][place]))
        return GroupId(group.epoch, int(self._starts[source]) + group.prompt)

    def row(self, group: GroupId) -> bytes:
        source = int(np.searchsorted(self._starts, group.prompt, side="right")) - 1
        return self._pools[source].row(GroupId(group.epoch, group.prompt - int(self._starts[source])))

    def _round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The pool of each place in a round, and which of that pool's turns in the round it is."""
        sources = np.repeat(np.arange(len(self._pools)), self._shares)
        sources = np.random.default_rng([self._seed, number, len(self._pools)]).permutation(sources)
        turns = np.empty(len(sources), int)
        for source, share in enumerate(self._shares):
            turns[sources == source] = np.arange(share)
        return sources, turns


def _rounded(parts: np.ndarray, num: int) -> np.ndarray:
    """`num` prompts in the shares `parts`, which sum to 1: whole numbers whose sum is `num`."""
    return np.diff(np.rint(np.cumsum(parts) * num).astype(int), prepend=0)
