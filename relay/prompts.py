"""The prompt pool: the data's rows in the order in which their groups are leased."""

import msgspec
import numpy as np

from ..comm.messages import GroupId
from .dataset import DatasetRows


class PromptPool:
    """Rows dealt out by a cursor: the position in the data is one integer.

    The order of an epoch is a permutation drawn from (seed, epoch), so that cursor and seed alone say what comes next.
    """

    def __init__(self, rows: DatasetRows, *, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.arange(len(rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def group_at(self, cursor: int) -> GroupId:
        """The group that the `cursor`-th first lease starts."""
        epoch, index = divmod(cursor, len(self._rows))
        if self._shuffle and self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)))
        return GroupId(epoch, int(self._order[1][index]))

    def row(self, group: GroupId) -> msgspec.Raw:
        """The row of a group, as JSON."""
        return msgspec.Raw(self._rows[group.prompt])
