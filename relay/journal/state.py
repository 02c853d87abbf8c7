"""The hub's state: a fold over events, free of I/O.

Invariant, in trajectories, after every event:

    leased = trained + evicted + filtered + failed + in flight

where *leased* counts each trajectory at its first lease, and *in flight* are those wanted, leased, ready or handed out.
`apply` asserts that every event is legal in the state that it meets. It only checks: `relay/hub` makes the decisions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import singledispatch

from ...comm.errors import SettingError
from ...comm.messages.base import GroupId, RowId
from . import events as ev
from .records import Account, Grant, Group, Row, RowStatus, TaskRecord

if not __debug__:
    raise SettingError("PYTHONOPTIMIZE: the rules of the journal are assertions; run Python without -O")


@dataclass(slots=True)
class HubState:
    """Everything the hub knows. `cursor` counts first leases: with the seed, it is the position in the data set.

    `num_moved` counts trajectories that went from one rollout to another, `regenerated` those whose last copy was lost,
    `num_continued` those that were finished where a dead holder had stopped, with `tokens_kept` of its tokens.
    `incarnations` are those of the lease holders; `checkpoint_after` is the step when a checkpoint was asked for last.
    `trainer_restarts` counts the whole run, `restarts_in_step` those since the last trained step.
    """

    epoch: int = 0
    run_id: str = ""
    hub_restarts: int = 0
    samples_per_prompt: int = 0
    cursor: int = 0
    step: int = 0
    version: int = -1
    digest: str = ""
    tokens_trained: int = 0
    num_moved: int = 0
    regenerated: int = 0
    checkpoint_after: int = -1
    ending: ev.Ending | None = None
    num_continued: int = 0
    tokens_kept: int = 0
    trainer_incarnation: int = 1
    trainer_restarts: int = 0
    restarts_in_step: int = 0
    ended: str = ""
    groups: dict[GroupId, Group] = field(default_factory=dict)
    unassigned: dict[GroupId, None] = field(default_factory=dict)
    in_training: list[GroupId] = field(default_factory=list)
    lost_storage_ids: set[str] = field(default_factory=set)
    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    account: Account = field(default_factory=Account)
    staleness: Counter[int] = field(default_factory=Counter)
    versions_per_trajectory: Counter[int] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        """Trajectories that were leased and have not met an end yet."""
        return sum(len(group.rows) - len(group.samples(RowStatus.FAILED)) for group in self.groups.values())

    @property
    def is_balanced(self) -> bool:
        """Whether the accounting identity holds."""
        a = self.account
        return a.leased == a.trained + a.evicted + a.filtered + a.failed + self.in_flight

    def queued(self) -> list[Group]:
        """Groups that take a place in the queue: leased or ready, and not handed out for training."""
        return [group for group in self.groups.values() if group.step is None]

    def rows(self, *statuses: RowStatus) -> list[tuple[RowId, Row]]:
        """The rows with one of these statuses, and their names."""
        return [(group.row_id(s), group.rows[s]) for group in self.groups.values() for s in group.samples(*statuses)]

    def row(self, row_id: RowId) -> Row | None:
        """A trajectory, or None if it has met its end."""
        group = self.groups.get(row_id.group)
        return group.rows[row_id.sample] if group and row_id.sample < len(group.rows) else None

    def has_attempt(self, row_id: RowId, attempt: int) -> bool:
        """Whether this attempt of a row is in the queue."""
        row = self.row(row_id)
        return row is not None and row.status is RowStatus.READY and row.attempt == attempt

    def missing(self, attempts: Mapping[RowId, int]) -> list[RowId]:
        """Those of these attempts that are not in the queue any more."""
        return [row_id for row_id, attempt in attempts.items() if not self.has_attempt(row_id, attempt)]

    def release(self, rows: Iterable[RowId]) -> None:
        """Forget which tasks had these rows: they leave the queue, or get another attempt."""
        gone = list(rows)
        for record in self.tasks.values():
            record.assigned.difference_update(gone)


@singledispatch
def apply(event: ev.Event, state: HubState) -> None:
    """Move `state` by one event, in place. Raises AssertionError for an event that is not legal in this state."""
    raise AssertionError(f"no rule for {event}")


@apply.register
def _(event: ev.Opened, state: HubState) -> None:
    assert event.epoch > state.epoch, f"hub epoch {event.epoch} after {state.epoch}"
    state.epoch, state.samples_per_prompt, state.run_id = event.epoch, event.samples_per_prompt, event.run_id
    state.hub_restarts, state.checkpoint_after, state.ending, state.ended = 0, -1, None, ""
    for forgotten in (state.in_training, state.lost_storage_ids, state.incarnations, state.grants):
        forgotten.clear()  # the incarnations of a resumed run count from 1 again
    state.trainer_incarnation, state.restarts_in_step = 1, 0
    for record in state.tasks.values():
        for number, batch in list(record.open_batches.items()):
            record.close(number, consumed=(), missing=batch.attempts)
        record.assigned.clear()
    for group in state.groups.values():
        group.step = None
        for sample in group.samples(RowStatus.LEASED, RowStatus.READY):
            group.rows[sample].reset()
        state.unassigned[group.id] = None


@apply.register
def _(event: ev.HubRestarted, state: HubState) -> None:
    assert state.epoch, "a hub that never opened was started again"
    state.hub_restarts += 1


@apply.register
def _(event: ev.Leased, state: HubState) -> None:
    group = state.groups.get(event.group)
    if group is None:
        assert event.attempt == 1, f"group {event.group} is not open"
        group = Group(event.group, state.cursor, [Row() for _ in event.samples])
        state.groups[event.group] = group
        state.cursor += 1
        state.account.leased += len(event.samples)
    state.unassigned.pop(event.group, None)
    for sample in event.samples:
        row = group.rows[sample]
        assert row.status is RowStatus.WANTED, f"{event.group}.{sample} is {row.status.name}"
        assert row.attempt < event.attempt, f"{event.group}.{sample}: attempt {event.attempt} after {row.attempt}"
        row.status, row.attempt = RowStatus.LEASED, event.attempt
        row.version, row.holder = event.version, event.holder
    state.incarnations[event.holder] = event.request_id >> 32
    grant = state.grants.get(event.holder)
    if grant is None or grant.request_id != event.request_id or not event.request_id:
        grant = state.grants[event.holder] = Grant(event.request_id, event.version)
    grant.leases.append((event.group, event.attempt))


@apply.register
def _(event: ev.Returned, state: HubState) -> None:
    group = state.groups[event.group]
    for sample in group.samples(RowStatus.LEASED):
        if group.rows[sample].attempt == event.attempt:
            group.rows[sample].status = RowStatus.WANTED
            state.unassigned[event.group] = None


@apply.register
def _(event: ev.Moved, state: HubState) -> None:
    for row_id, attempt in zip(event.rows, event.attempts, strict=True):
        row = state.row(row_id)
        assert row is not None and row.status is RowStatus.LEASED, f"row {row_id} is not leased"
        assert row.holder == event.source, f"row {row_id} is held by {row.holder}"
        assert row.attempt < attempt, f"{row_id}: attempt {attempt} after {row.attempt}"
        row.holder, row.attempt = event.holder, attempt
    state.incarnations[event.holder] = event.request_id >> 32
    state.num_moved += len(event.rows) * (event.source != event.holder)


@apply.register
def _(event: ev.RowReady, state: HubState) -> None:
    row = state.row(event.row)
    assert row is not None and row.status is RowStatus.LEASED, f"row {event.row} is not leased"
    assert not state.lost_storage_ids.intersection(event.units), f"row {event.row} is in a unit that is lost"
    row.status, row.storage_ids, row.version = RowStatus.READY, list(event.units), event.version
    row.num_tokens, row.reward, row.num_versions = event.num_tokens, event.reward, event.num_versions
    state.num_continued += event.num_kept > 0
    state.tokens_kept += event.num_kept


@apply.register
def _(event: ev.RowFailed, state: HubState) -> None:
    row = state.row(event.row)
    assert row is not None and row.status is RowStatus.LEASED, f"row {event.row} is not leased"
    row.status = RowStatus.FAILED
    state.account.failed += 1
    state.failures[event.reason] += 1
    group_id = event.row.group
    if all(row.status is RowStatus.FAILED for row in state.groups[group_id].rows):
        del state.groups[group_id]


@apply.register
def _(event: ev.RowsLost, state: HubState) -> None:
    for row_id, attempt in zip(event.rows, event.attempts, strict=True):
        row = state.row(row_id)
        assert row is not None and row.attempt == attempt, f"row {row_id} has no attempt {attempt}"
        assert row.status in (RowStatus.LEASED, RowStatus.READY), f"row {row_id} is {row.status.name}"
        state.regenerated += row.status is RowStatus.READY
        group = state.groups[row_id.group]
        row.reset()
        state.release([row_id])
        state.unassigned[group.id] = None
        if group.step is not None:  # it is handed out again once it is complete again
            group.step = None
            state.in_training.remove(group.id)


@apply.register
def _(event: ev.UnitLost, state: HubState) -> None:
    state.lost_storage_ids.add(event.unit)
    for row_id, row in state.rows(RowStatus.READY):
        if event.unit not in row.storage_ids:
            continue
        row.storage_ids = [unit for unit in row.storage_ids if unit != event.unit]
        if not row.storage_ids and state.groups[row_id.group].step is None:
            state.regenerated += 1
            row.reset()
            state.release([row_id])
            state.unassigned[row_id.group] = None


@apply.register
def _(event: ev.TaskHanded, state: HubState) -> None:
    attempts = dict(zip(event.rows, event.attempts, strict=True))
    for row_id, attempt in attempts.items():
        assert state.has_attempt(row_id, attempt), f"row {row_id} has no attempt {attempt} in the queue"
        assert state.groups[row_id.group].step is None, f"row {row_id} is handed out for training"
    state.tasks.setdefault(event.task, TaskRecord()).open_batch(event.number, event.consumer, attempts)


@apply.register
def _(event: ev.ColumnsReady, state: HubState) -> None:
    record = state.tasks[event.task]
    attempts = record.open_batches[event.number].attempts
    for row_id, units in zip(event.rows, event.units, strict=True):
        assert state.has_attempt(row_id, attempts[row_id]), f"row {row_id} is not in the queue any more"
        row = state.groups[row_id.group].rows[row_id.sample]
        assert units and set(units) <= set(row.storage_ids), f"row {row_id} is in {row.storage_ids}, not in {units}"
        row.storage_ids = list(units)
        row.columns |= set(event.columns)
    record.close(event.number, consumed=event.rows, missing=state.missing(attempts))


@apply.register
def _(event: ev.TaskReturned, state: HubState) -> None:
    record = state.tasks[event.task]
    attempts = record.open_batches[event.number].attempts
    record.close(event.number, consumed=(), missing=state.missing(attempts))


@apply.register
def _(event: ev.Evicted, state: HubState) -> None:
    group = state.groups.pop(event.group)
    assert group.step is None, f"group {event.group} is handed out"
    state.unassigned.pop(event.group, None)
    rows = group.row_ids(RowStatus.WANTED, RowStatus.LEASED, RowStatus.READY)
    state.account.evicted += len(rows)
    state.release(rows)


@apply.register
def _(event: ev.GroupFiltered, state: HubState) -> None:
    group = state.groups.pop(event.group)
    state.release(group.row_ids(RowStatus.READY))
    assert group.is_complete and group.step is None, f"group {event.group} cannot be filtered"
    state.account.filtered += len(group.samples(RowStatus.READY))


@apply.register
def _(event: ev.Handed, state: HubState) -> None:
    assert event.step == state.step, f"groups for step {event.step} while step {state.step} is trained"
    for group_id in event.groups:
        group = state.groups[group_id]
        assert group.is_complete and group.step is None, f"group {group_id} cannot be handed out"
        group.step = event.step
        state.in_training.append(group_id)


@apply.register
def _(event: ev.Trained, state: HubState) -> None:
    assert event.step == state.step, f"step {event.step} trained while step {state.step} was due"
    for group_id in state.in_training:
        group = state.groups.pop(group_id)
        rows = [group.rows[sample] for sample in group.samples(RowStatus.READY)]
        state.account.trained += len(rows)
        state.release(group.row_ids(RowStatus.READY))
        state.tokens_trained += sum(row.num_tokens for row in rows)
        state.staleness.update(event.step - row.version for row in rows)
        state.versions_per_trajectory.update(row.num_versions for row in rows)
    state.in_training.clear()
    state.step += 1
    state.restarts_in_step = 0


@apply.register
def _(event: ev.TrainerRestarted, state: HubState) -> None:
    """What was handed out stays handed out: the next incarnation gets it again."""
    assert event.incarnation > state.trainer_incarnation, f"{event.incarnation} after {state.trainer_incarnation}"
    state.trainer_incarnation = event.incarnation
    state.trainer_restarts += 1
    state.restarts_in_step += 1


@apply.register
def _(event: ev.Published, state: HubState) -> None:
    if event.version >= state.version:
        state.version, state.digest = event.version, event.digest


@apply.register
def _(event: ev.Received, state: HubState) -> None:
    """A receipt is for audits; it does not change the state."""


@apply.register
def _(event: ev.Checkpointed, state: HubState) -> None:
    assert event.step <= state.step, f"checkpoint of step {event.step} at step {state.step}"


@apply.register
def _(event: ev.CheckpointDue, state: HubState) -> None:
    state.checkpoint_after = event.after


@apply.register
def _(event: ev.Ending, state: HubState) -> None:
    state.ending = event


@apply.register
def _(event: ev.Ended, state: HubState) -> None:
    state.ended = event.reason
