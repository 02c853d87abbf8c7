"""What the consumers of the experience queue and the hub say to each other."""

import msgspec

from .base import GroupId, Message, RowId


class RequestRows(Message, frozen=True):
    """A consumer asks for rows of the first of `tasks` that has some; repeated with the same question until answered.

    Of `train` it gets groups of `step` beyond the `received` first. Of another task it gets rows of up to `max_tokens`, which is a
    micro-batch for each of its ranks; it names the hand-outs that it is `open_batches`, so that one whose letter was lost comes again.
    """

    request_id: int
    tasks: list[str]
    step: int = -1
    received: int = 0
    open_batches: tuple[int, ...] = ()
    max_tokens: int = 1 << 14


class ColumnsAdded(Message, frozen=True):
    """A consumer has done all of a hand-out: for each row the units that have the new columns; none for a row it gave up."""

    task: str
    batch_id: int
    columns: list[str]
    rows: list[RowId]
    storage_ids: list[list[str]]


class RowsNotFound(Message, frozen=True):
    """A consumer found rows, as they were named to it, in no unit."""

    rows: list[RowId]
    attempts: list[int]
    reason: str


class RowRef(msgspec.Struct, frozen=True):
    """Metadata of one row: its name, the units that have its bytes, and the figures that plan its training."""

    row: RowId
    attempt: int
    storage_ids: list[str]
    version: int
    num_tokens: int
    reward: float

    @property
    def key(self) -> str:
        """The key of its bytes in each of its units."""
        return self.row.key(self.attempt)


class GroupRef(msgspec.Struct, frozen=True):
    """Metadata of samples of a group: for each, which units have the bytes."""

    group: GroupId
    samples: list[int]
    attempts: list[int]
    storage_ids: list[list[str]]
    versions: list[int]
    num_tokens: list[int]
    rewards: list[float]

    def row(self, index: int) -> RowId:
        """The name of its `index`-th row."""
        return self.group.row(self.samples[index])

    def key(self, index: int) -> str:
        """Where the bytes of its `index`-th row lie in each of their units."""
        return self.row(index).key(self.attempts[index])

    def rows(self) -> list[RowRef]:
        """Its rows one by one."""
        names = map(self.group.row, self.samples)
        columns = (names, self.attempts, self.storage_ids, self.versions, self.num_tokens, self.rewards)
        return [RowRef(*values) for values in zip(*columns, strict=True)]


class RowBatch(Message, frozen=True):
    """The answer to `RequestRows`: for `train`, groups from number `first` of `total` on; for another task, its hand-out `batch_id`.

    `metrics` are the fleet's figures at this moment.
    """

    step: int
    first: int
    total: int
    groups: list[GroupRef]
    metrics: dict[str, float]
    task: str = "train"
    batch_id: int = 0
    request_id: int = 0

    def rows(self) -> list[RowRef]:
        """The rows of all its groups."""
        return [row for group in self.groups for row in group.rows()]
