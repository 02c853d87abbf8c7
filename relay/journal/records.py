"""Trajectories and groups as the hub knows them."""

import enum
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ...comm.messages import GroupId, RowId


class RowStatus(enum.Enum):
    """Life of a trajectory. WANTED and LEASED are unfinished; READY and FAILED are its two ends before training."""

    WANTED = enum.auto()
    LEASED = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


UNFINISHED = (RowStatus.WANTED, RowStatus.LEASED)
STARTED = (RowStatus.LEASED, RowStatus.READY)


@dataclass(slots=True)
class Row:
    """One trajectory as the hub knows it; `version` is the one that generates or generated it."""

    status: RowStatus = RowStatus.WANTED
    attempt: int = 0
    version: int = 0
    holder: str = ""
    storage_ids: list[str] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    """Those that tasks have added."""
    num_tokens: int = 0
    reward: float = 0.0
    num_versions: int = 1

    def is_ready(self, attempt: int) -> bool:
        """Whether this attempt lies in the queue."""
        return self.status is RowStatus.READY and self.attempt == attempt

    def reset(self) -> None:
        """It has to be generated again; the next lease makes another attempt of it."""
        self.status, self.storage_ids, self.columns = RowStatus.WANTED, [], set()


@dataclass(slots=True)
class Group:
    """The samples of one prompt; `lease_order` is the number of its first lease, `step` the step it was handed out for."""

    id: GroupId
    lease_order: int
    rows: list[Row]
    step: int | None = None

    @property
    def has_started(self) -> bool:
        """Whether any of its rows is generated or being generated; what came back will be of a version yet unknown."""
        return any(row.status in STARTED for row in self.rows)

    @property
    def version(self) -> int:
        """The oldest version among its rows that are generated or being generated: what its staleness is counted from."""
        return min(row.version for row in self.rows if row.status in STARTED)

    @property
    def next_attempt(self) -> int:
        """One that no row of the group has had: a group's attempt always has one holder."""
        return 1 + max(row.attempt for row in self.rows)

    @property
    def is_complete(self) -> bool:
        return all(row.status not in UNFINISHED for row in self.rows)

    def has(self, columns: AbstractSet[str]) -> bool:
        """Whether it is complete, and its rows have all these columns."""
        return self.is_complete and all(row.columns >= columns for row in self.rows if row.status is RowStatus.READY)

    def row_id(self, sample: int) -> RowId:
        """The name of a sample."""
        return self.id.row(sample)

    def row_ids(self, *statuses: RowStatus) -> list[RowId]:
        """Names of the samples with one of these statuses."""
        return [self.id.row(sample) for sample in self.samples(*statuses)]

    def samples(self, *statuses: RowStatus) -> list[int]:
        """Indices of the samples with one of these statuses."""
        return [sample for sample, row in enumerate(self.rows) if row.status in statuses]
