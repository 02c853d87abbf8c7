"""One rank's share of the hub's answer, with the columns that were fetched for its rows."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ...comm.messages.base import GroupId
from ...comm.messages.queue import RowBatch, RowRef, TrainBatch

TRAIN = "train"
"""The trainer's task."""


@dataclass(slots=True)
class Batch:
    """This rank's rows in micro-batches, and their columns by key of the row.

    `row_batch` is the hub's answer, the same on all ranks, without the groups that could not be read. All ranks have equally
    many micro-batches, some of them empty, since ranks that share one policy run together.
    """

    row_batch: RowBatch | TrainBatch
    micro_batches: list[list[RowRef]]
    columns: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    num_forward: int = 0
    """The last micro-batches, as many on all ranks, are of groups without a gradient: they need no backward pass."""
    has_trees: bool = False
    """Each micro-batch is computed as a prefix tree, where the policy allows it; else each row alone."""

    @property
    def task(self) -> str:
        """The task that it is for."""
        return self.row_batch.task if isinstance(self.row_batch, RowBatch) else TRAIN

    @property
    def rows(self) -> list[RowRef]:
        """This rank's rows, in the order of training."""
        return [row for part in self.micro_batches for row in part]

    def without(self, groups: Collection[GroupId]) -> "Batch":
        """The batch without some of its groups; as many micro-batches as before."""
        kept = [group for group in self.row_batch.groups if group.group not in groups]
        parts = [[row for row in part if row.row.group not in groups] for part in self.micro_batches]
        return replace(self, row_batch=msgspec.structs.replace(self.row_batch, groups=kept), micro_batches=parts)

    def split(self, num_parts: int) -> "Batch":
        """The batch with each micro-batch in this many parts, some of them empty: as many on all ranks."""
        sizes = [(part, math.ceil(len(part) / num_parts)) for part in self.micro_batches]
        parts = [part[i * size : (i + 1) * size] for part, size in sizes for i in range(num_parts)]
        return replace(self, micro_batches=parts, num_forward=self.num_forward * num_parts)

    def __getitem__(self, column: str) -> list[np.ndarray]:
        return [self.columns[row.key][column] for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)
