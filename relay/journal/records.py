"""The records that the hub keeps: trajectories, their groups, what each task has consumed, evaluations, and an index of the queue."""

import enum
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from ...comm.messages.base import GroupId, RowId
from .events import Evaluated, EvaluationBegun


class RowStatus(enum.Enum):
    """Life of a trajectory. WANTED and LEASED are unfinished; READY and FAILED are its two ends before training."""

    WANTED = enum.auto()
    LEASED = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


_WANTED, _LEASED, _READY, _FAILED = RowStatus
_STARTED = (_LEASED, _READY)


@dataclass(slots=True)
class Account:
    """Numbers of trajectories, by their end; `leased` counts each once, at its first lease."""

    leased: int = 0
    trained: int = 0
    evicted: int = 0
    filtered: int = 0
    failed: int = 0


@dataclass(slots=True)
class TokenAccount:
    """Numbers of tokens that a policy drew, by the end of their trajectories, since the run was last started.

    After every event: ended + restored = trained + evaluated + filtered + failed + evicted + lost + ready.
    """

    ended: int = 0
    """Of all trajectories that came to an end in a rollout."""
    restored: int = 0
    """Of those that came back from the disk with a resumed run."""
    begun: int = 0
    """Of unfinished trajectories that came back from the disk: they are not in the sum, since they end like others."""
    trained: int = 0
    evaluated: int = 0
    filtered: int = 0
    failed: int = 0
    evicted: int = 0
    lost: int = 0
    """Of finished trajectories of which no copy was left."""
    ready: int = 0
    """Of those in the queue and in training."""
    gone: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each rollout that has died, tokens drawn and tokens of ended trajectories."""

    @property
    def is_balanced(self) -> bool:
        ends = self.trained + self.evaluated + self.filtered + self.failed + self.evicted + self.lost
        return self.ended + self.restored == ends + self.ready


@dataclass(slots=True)
class Losses:
    """Counts of the trajectories that ended since the last trained step, by cause; trained ones are not counted.

    `failed`, `filtered` and `evicted` as in the account; `lost` had no copy left and are generated again. `failure` is the reason of the
    first that failed, `loss` that of the last that was lost. `in_vain` counts those that met an end since a group was last handed to the
    trainer.
    """

    finished: int = 0
    failed: int = 0
    filtered: int = 0
    evicted: int = 0
    lost: int = 0
    failure: str = ""
    loss: str = ""
    in_vain: int = 0
    began: float = 0.0
    """When the last step ended, or the run began, on the journal's clock."""
    step_s: float = 0.0
    """Seconds from the end of a step to that of the next, smoothed; 0 until one was trained."""

    def fail(self, num_rows: int, reason: str) -> None:
        self.failed += num_rows
        self.in_vain += num_rows
        self.failure = self.failure or reason

    def filter(self, num_rows: int) -> None:
        self.filtered += num_rows
        self.in_vain += num_rows

    def evict(self, num_rows: int) -> None:
        self.evicted += num_rows
        self.in_vain += num_rows

    def lose(self, num_rows: int, reason: str) -> None:
        self.lost += num_rows
        self.loss = reason

    def next_step(self, now: float) -> "Losses":
        """The record of the step that begins now."""
        took_s = max(0.0, now - self.began)
        return Losses(began=now, step_s=self.step_s + 0.3 * (took_s - self.step_s) if self.step_s else took_s)


class Row(msgspec.Struct, array_like=True, gc=False):
    """One trajectory; `version` is the one that generates or generated it, `columns` are those that tasks have added."""

    status: RowStatus = RowStatus.WANTED
    attempt: int = 0
    version: int = 0
    holder: str = ""
    storage_ids: list[str] = []
    columns: frozenset[str] = frozenset()
    num_tokens: int = 0
    reward: float = 0.0
    num_versions: int = 1
    num_prompt_tokens: int = 0
    """Those of `num_tokens` that all samples of the group begin with; 0 where that is not known."""
    num_drawn: int = 0
    """Those of `num_tokens` that a policy drew."""

    def reset(self) -> None:
        """The row has to be generated again; its next lease gives it another attempt."""
        self.status = RowStatus.WANTED
        self.storage_ids = []
        self.columns = frozenset()


@dataclass(slots=True)
class Group:
    """The samples of one prompt; `lease_order` is the number of its first lease, `step` the step it was handed out for."""

    id: GroupId
    lease_order: int
    rows: list[Row]
    step: int | None = None

    @property
    def has_started(self) -> bool:
        """Whether any row is generated or being generated; the version of a row that came back is not known yet."""
        return any(row.status in _STARTED for row in self.rows)

    @property
    def version(self) -> int:
        """The oldest version among the rows that are generated or being generated; the group's staleness counts from it."""
        return min(row.version for row in self.rows if row.status in _STARTED)

    @property
    def next_attempt(self) -> int:
        """An attempt that no row of the group has had, so that an attempt of a group always has one holder."""
        return 1 + max(row.attempt for row in self.rows)

    @property
    def is_complete(self) -> bool:
        for row in self.rows:  # noqa: SIM110 - the fold asks for each row that ends, and a generator takes twice as long
            if row.status is _WANTED or row.status is _LEASED:
                return False
        return True

    def has(self, columns: AbstractSet[str]) -> bool:
        """Whether the group is complete and its rows have all these columns."""
        if not columns:
            return self.is_complete
        return self.is_complete and all(row.columns >= columns for row in self.rows if row.status is _READY)

    def row_id(self, sample: int) -> RowId:
        return self.id.row(sample)

    def row_ids(self, *statuses: RowStatus) -> list[RowId]:
        """Names of the samples with one of these statuses."""
        return [self.id.row(sample) for sample in self.samples(*statuses)]

    def samples(self, *statuses: RowStatus) -> list[int]:
        """Indices of the samples with one of these statuses."""
        return [sample for sample, row in enumerate(self.rows) if row.status in statuses]


@dataclass(slots=True)
class Grant:
    """The last answer to a holder's request for leases: (group, attempt) of each lease."""

    request_id: int
    version: int
    leases: list[tuple[GroupId, int]] = field(default_factory=list)


@dataclass(slots=True)
class OpenBatch:
    """Rows that a consumer works on, as these attempts."""

    consumer: str
    attempts: dict[RowId, int]


@dataclass(slots=True)
class TaskRecord:
    """A task's consumption: every row handed out is consumed, returned, or left the queue meanwhile (`dropped`).

    `assigned` are the rows of the queue that the task must not get: their present attempt is handed out or consumed.
    """

    num_batches: int = 0
    handed: int = 0
    consumed: int = 0
    returned: int = 0
    dropped: int = 0
    open_batches: dict[int, OpenBatch] = field(default_factory=dict)
    assigned: set[RowId] = field(default_factory=set)

    def open_batch(self, number: int, consumer: str, attempts: dict[RowId, int]) -> None:
        """Hand a consumer rows that the task has not had."""
        assert number == self.num_batches + 1, f"batch {number} after {self.num_batches}"
        twice = self.assigned.intersection(attempts)
        assert not twice, f"{sorted(twice)} handed out twice"
        self.num_batches = number
        self.handed += len(attempts)
        self.assigned.update(attempts)
        self.open_batches[number] = OpenBatch(consumer, attempts)

    def close(self, number: int, consumed: Iterable[RowId], missing: Iterable[RowId]) -> None:
        """End a batch: some rows are consumed, some are missing from the queue in this attempt, the rest comes back."""
        attempts = self.open_batches.pop(number).attempts
        done = set(consumed)
        gone = set(missing)
        assert not done & gone and attempts.keys() >= done | gone
        self.consumed += len(done)
        self.dropped += len(gone)
        self.returned += len(attempts) - len(done) - len(gone)
        self.assigned -= attempts.keys() - done - gone

    @property
    def is_balanced(self) -> bool:
        """Whether the counts add up."""
        num_open = sum(len(batch.attempts) for batch in self.open_batches.values())
        return self.handed == self.consumed + self.returned + self.dropped + num_open


@dataclass(slots=True)
class EvaluationLog:
    """The evaluation under way, or the last one, and the metrics of all that are complete, in order.

    After every event, in samples: asked = evaluated + failed + open.
    """

    begun: EvaluationBegun | None = None
    groups: dict[GroupId, Group] = field(default_factory=dict)
    scores: dict[RowId, Evaluated] = field(default_factory=dict)
    num_begun: int = 0
    num_leased: int = 0
    """Samples that are being generated."""
    asked: int = 0
    evaluated: int = 0
    failed: int = 0
    results: list[dict[str, float]] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Samples without an end."""
        return sum(len(group.samples(_WANTED, _LEASED)) for group in self.groups.values())

    @property
    def is_balanced(self) -> bool:
        return self.asked == self.evaluated + self.failed + self.open

    @property
    def account(self) -> dict[str, int | bool]:
        """The invariant's numbers, for print and file."""
        counts = {"asked": self.asked, "evaluated": self.evaluated, "failed": self.failed, "open": self.open}
        return counts | {"holds": self.is_balanced}

    @property
    def is_untouched(self) -> bool:
        """Whether no sample has ended or is being generated."""
        return not self.scores and not self.num_leased

    def is_after(self, due: int) -> bool:
        """Whether the evaluation that was due at this version has begun."""
        return self.begun is not None and self.begun.due >= due

    def wanted(self) -> list[Group]:
        """The groups with samples that no rollout has."""
        return [group for group in self.groups.values() if group.samples(_WANTED)]

    def reopen(self) -> None:
        """Samples that were being generated have lost their holders."""
        self.num_leased = 0
        for group in self.groups.values():
            for sample in group.samples(_LEASED):
                group.rows[sample].reset()


@dataclass(slots=True)
class QueueIndex:
    """The groups in the queue that can be trained, and how many have begun by their version.

    So that no decision looks through all groups: at scale the queue has thousands.
    """

    needs: frozenset[str] = frozenset()
    """Columns that training needs besides those of the rollout."""
    ready: dict[GroupId, Group] = field(default_factory=dict)
    """Complete groups with these columns, which are not handed out."""
    at_tasks: set[GroupId] = field(default_factory=set)
    """Complete groups that lack some of these columns."""
    begun: Counter[int] = field(default_factory=Counter)
    """Groups of which a row is generated or being generated, by the group's version."""
    version_of: dict[GroupId, int] = field(default_factory=dict)
    """The version by which a group is counted in `begun`."""

    def update(self, group: Group) -> None:
        """Count a group of the queue, one of whose rows changed, as what it is now."""
        if group.id.is_evaluation:
            return
        versions = [row.version for row in group.rows if row.status is _LEASED or row.status is _READY]
        if not versions or group.step is not None:
            self.remove(group.id)
            return
        version = min(versions)
        if version != self.version_of.get(group.id):
            self.remove(group.id)
            self.version_of[group.id] = version
            self.begun[version] += 1
        self.ready.pop(group.id, None)
        self.at_tasks.discard(group.id)
        if not group.is_complete:
            return
        if group.has(self.needs):
            self.ready[group.id] = group
        else:
            self.at_tasks.add(group.id)

    def remove(self, group_id: GroupId) -> None:
        """Forget a group that leaves the queue."""
        self.ready.pop(group_id, None)
        self.at_tasks.discard(group_id)
        version = self.version_of.pop(group_id, None)
        if version is not None:
            self.begun[version] -= 1
            if not self.begun[version]:
                del self.begun[version]

    def ready_in_order(self) -> list[Group]:
        """The groups that can be trained, the oldest first."""
        return sorted(self.ready.values(), key=lambda group: group.lease_order)
