"""The hub's state as it is at a moment; `state.py` has the rules by which events change it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from ...comm.messages.base import GroupId, RowId
from . import events as ev
from .records import Account, EvaluationLog, Grant, Group, Losses, QueueIndex, Row, RowStatus, TaskRecord, TokenAccount
from .window import Window

_NOT_OPENED = ev.Opened(epoch=0, samples_per_prompt=0)


_LEASED, _READY, _FAILED = RowStatus.LEASED, RowStatus.READY, RowStatus.FAILED


@dataclass(slots=True)
class HubState:
    """Everything the hub knows. `cursor` counts first leases, and prompts passed over: with the seed, it is the position in the data.

    `dropped` are the prompts that no rollout could use, with the newest reason of each; those in `passed_over` have not been tried
    again since by a resumed run.
    `num_moved` counts trajectories that went from one rollout to another, `regenerated` those whose last copy was lost,
    `num_continued` those that were finished where a dead holder had stopped, with `tokens_kept` of its tokens.
    `num_restored` counts those that were read from the disk when the run was resumed last.
    `incarnations` are those of the lease holders; `checkpoint_after` is the step when a checkpoint was asked for last,
    `checkpointed` that of the newest checkpoint, -1 without one.
    `trainer_restarts` counts the whole run, `restarts_in_step` those since the last trained step.
    """

    opened: ev.Opened = _NOT_OPENED
    """The start of the run under way; epoch 0 before the first one."""
    hub_restarts: int = 0
    cursor: int = 0
    step: int = 0
    version: int = -1
    digest: str = ""
    tokens_trained: int = 0
    num_moved: int = 0
    regenerated: int = 0
    checkpoint_after: int = -1
    checkpointed: int = -1
    ending: ev.Ending | None = None
    num_continued: int = 0
    num_restored: int = 0
    tokens_kept: int = 0
    trainer_incarnation: int = 1
    trainer_restarts: int = 0
    restarts_in_step: int = 0
    num_memory_deaths: int = 0
    """Times since the last start that the trainer died because the memory of a GPU was full."""
    ended: str = ""
    groups: dict[GroupId, Group] = field(default_factory=dict)
    held: dict[str, dict[RowId, Row]] = field(default_factory=dict)
    """The leased rows of each rollout that has some, those of an evaluation included: a death looks through no others."""
    unassigned: dict[GroupId, None] = field(default_factory=dict)
    in_training: list[GroupId] = field(default_factory=list)
    queue: QueueIndex = field(default_factory=QueueIndex)
    window: Window = field(default_factory=Window)
    evaluations: EvaluationLog = field(default_factory=EvaluationLog)
    lost_storage_ids: set[str] = field(default_factory=set)
    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    dropped: dict[int, str] = field(default_factory=dict)
    passed_over: set[int] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    account: Account = field(default_factory=Account)
    tokens: TokenAccount = field(default_factory=TokenAccount)
    losses: Losses = field(default_factory=Losses)
    staleness: Counter[int] = field(default_factory=Counter)
    versions_per_trajectory: Counter[int] = field(default_factory=Counter)
    midway: Counter[str] = field(default_factory=Counter)
    """Times that a rollout took new weights in the middle of its trajectories: `starved` by the hub's order, `age` by that of its weights."""

    @property
    def epoch(self) -> int:
        """The number of starts of the run."""
        return self.opened.epoch

    @property
    def samples_per_prompt(self) -> int:
        return self.opened.samples_per_prompt

    @property
    def in_flight(self) -> int:
        """Trajectories that were leased and have not met an end yet."""
        return sum(row.status is not _FAILED for group in self.groups.values() for row in group.rows)

    @property
    def is_balanced(self) -> bool:
        """Whether the accounting identity holds."""
        a = self.account
        is_trained = a.leased == a.trained + a.evicted + a.filtered + a.failed + self.in_flight
        return is_trained and self.evaluations.is_balanced and self.tokens.is_balanced

    @property
    def num_queued(self) -> int:
        """Groups that take a place in the queue."""
        return len(self.groups) - len(self.in_training)

    def queued(self) -> list[Group]:
        """Groups that take a place in the queue: leased or ready, and not handed out for training."""
        return [group for group in self.groups.values() if group.step is None]

    def rows(self, *statuses: RowStatus) -> list[tuple[RowId, Row]]:
        """The rows of the queue and of training with one of these statuses, and their names."""
        return [(group.row_id(s), group.rows[s]) for group in self.groups.values() for s in group.samples(*statuses)]

    def lease(self, rows: Mapping[RowId, Row], holder: str) -> None:
        """A rollout has these rows from now on."""
        for row in rows.values():
            row.status = _LEASED
            row.holder = holder
        if rows:
            self.held.setdefault(holder, {}).update(rows)

    def make_indexes(self) -> None:
        """Make the indexes of a state that has none: which rows each rollout has, and what can be trained."""
        for group in (*self.groups.values(), *self.evaluations.groups.values()):
            for sample in group.samples(_LEASED):
                row = group.rows[sample]
                self.lease({group.row_id(sample): row}, row.holder)
            self.queue.update(group)

    def end_lease(self, row_id: RowId, row: Row) -> None:
        """No rollout has a row any more; its new status is the caller's."""
        if row.status is _LEASED:
            rows = self.held[row.holder]
            del rows[row_id]
            if not rows:
                del self.held[row.holder]

    def group(self, group_id: GroupId) -> Group | None:
        """An open group, of training or of the evaluation under way."""
        groups = self.evaluations.groups if group_id.is_evaluation else self.groups
        return groups.get(group_id)

    def row(self, row_id: RowId) -> Row | None:
        """A trajectory, or None if it has met its end."""
        group = self.group(row_id.group)
        return group.rows[row_id.sample] if group and row_id.sample < len(group.rows) else None

    def end_group(self, group: Group) -> None:
        """The last row of a group is ready or failed."""
        if group.id in self.queue.ready or group.id in self.queue.at_tasks:
            self.window.end(group.id)

    def take_tokens(self, group: Group) -> int:
        """The drawn tokens of a group's ready rows, which leave the queue."""
        num_tokens = sum([group.rows[sample].num_drawn for sample in group.samples(_READY)])
        self.tokens.ready -= num_tokens
        return num_tokens

    def has_attempt(self, row_id: RowId, attempt: int) -> bool:
        """Whether this attempt of a row is in the queue."""
        row = self.row(row_id)
        return row is not None and row.status is _READY and row.attempt == attempt

    def missing(self, attempts: Mapping[RowId, int]) -> list[RowId]:
        """The attempts among these that are no longer in the queue."""
        return [row_id for row_id, attempt in attempts.items() if not self.has_attempt(row_id, attempt)]

    def release(self, rows: Iterable[RowId]) -> None:
        """Forget which tasks had these rows: they leave the queue, or get another attempt."""
        gone = list(rows)
        for record in self.tasks.values():
            record.assigned.difference_update(gone)


def account_dict(state: HubState) -> dict[str, int | bool]:
    """The accounting identity of a state, for print and file."""
    return {**asdict(state.account), "in_flight": state.in_flight, "holds": state.is_balanced}
