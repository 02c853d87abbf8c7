"""The fold: the rules by which events change the hub's state (`hub_state.py`), free of I/O.

Invariant, in trajectories, after every event:

    leased = trained + evicted + filtered + failed + in flight

where *leased* counts each trajectory at its first lease, and *in flight* are those wanted, leased, ready or handed out.
`apply` asserts that every event is legal in the state that it meets. It only checks: `relay/hub` makes the decisions.
"""

from collections.abc import Iterable
from functools import singledispatch

from ...comm.errors import SettingError
from ...comm.messages.base import RowId
from . import events as ev
from .evaluations import begin_evaluation, end_sample
from .hub_state import HubState
from .records import Grant, Group, Losses, QueueIndex, Row, RowStatus, TaskRecord, TokenAccount

if not __debug__:
    raise SettingError("PYTHONOPTIMIZE: the rules of the journal are assertions; run Python without -O")


_WANTED, _LEASED, _READY, _FAILED = RowStatus
"""By these names, since Python 3.11 takes longer to find a member by its class than some rules take for an event."""


def apply(event: ev.Event, state: HubState) -> None:
    """Move `state` by one event, in place. Raises AssertionError for an event that is not legal in this state."""
    fold((event,), state)


def fold(events: Iterable[ev.Event], state: HubState) -> None:
    """Move `state` by these events in their order. At the first one that is not legal it raises AssertionError, KeyError or IndexError."""
    rules = _RULES
    window = state.window
    for event in events:
        if event.t != window.now:
            queue = state.queue
            num_in_training = len(state.in_training)
            num_queued = len(state.groups) - num_in_training
            window.pass_time(event.t, num_queued, len(queue.ready), num_in_training, len(queue.at_tasks))
        rules[type(event)](event, state)


@singledispatch
def _change(event: ev.Event, state: HubState) -> None:
    raise AssertionError(f"no rule for {event}")


@_change.register
def _(event: ev.Opened, state: HubState) -> None:
    assert event.epoch > state.epoch, f"hub epoch {event.epoch} after {state.epoch}"
    state.opened = event
    state.hub_restarts = 0
    state.num_restored = 0
    state.checkpoint_after = -1
    state.ending = None
    state.ended = ""
    for forgotten in (state.in_training, state.lost_storage_ids, state.incarnations, state.grants, state.drained):
        forgotten.clear()  # the incarnations of a resumed run count from 1 again
    state.trainer_incarnation = 1
    state.restarts_in_step = 0
    state.num_memory_deaths = 0
    for record in state.tasks.values():
        for number, batch in list(record.open_batches.items()):
            record.close(number, consumed=(), missing=batch.attempts)
        record.assigned.clear()
    for group in state.groups.values():
        group.step = None
        for sample in group.samples(_LEASED, _READY):
            group.rows[sample].reset()
        state.unassigned[group.id] = None
    state.held.clear()
    state.window.restart()
    state.losses = Losses(began=event.t)
    state.evaluations.reopen()
    state.passed_over.clear()  # the data may have been mended
    state.queue = QueueIndex(frozenset(event.needs))  # no row has begun
    state.tokens = TokenAccount()


@_change.register
def _(event: ev.HubRestarted, state: HubState) -> None:
    assert state.epoch, "a hub that never opened was started again"
    state.hub_restarts += 1
    state.window.open()


@_change.register
def _(event: ev.Leased, state: HubState) -> None:
    group = state.group(event.group)
    if group is None:
        assert event.attempt == 1 and not event.group.is_evaluation, f"group {event.group} is not open"
        group = Group(event.group, state.cursor, [Row() for _ in event.samples])
        state.groups[event.group] = group
        state.cursor += event.passed_over + 1
        state.account.leased += len(event.samples)
    state.unassigned.pop(event.group, None)
    epoch, prompt, is_evaluation, holder = group.id.epoch, group.id.prompt, group.id.is_evaluation, event.holder
    held = state.held.setdefault(holder, {}) if event.samples else {}
    for sample in event.samples:
        row = group.rows[sample]
        assert row.status is _WANTED, f"{event.group}.{sample} is {row.status.name}"
        assert row.attempt < event.attempt, f"{event.group}.{sample}: attempt {event.attempt} after {row.attempt}"
        row.attempt = event.attempt
        row.version = event.version if event.oldest is None else event.oldest
        row.status = _LEASED
        row.holder = holder
        held[RowId(epoch, prompt, sample, is_evaluation)] = row
    if is_evaluation:
        state.evaluations.num_leased += len(event.samples)
    elif len(event.samples) == len(group.rows):
        state.window.lease(event.group)
    state.queue.update(group)
    state.incarnations[event.holder] = event.request_id >> 32
    grant = state.grants.get(event.holder)
    if grant is None or grant.request_id != event.request_id or not event.request_id:
        grant = state.grants[event.holder] = Grant(event.request_id, event.version)
    grant.leases.append((event.group, event.attempt))


@_change.register
def _(event: ev.Returned, state: HubState) -> None:
    group = state.group(event.group)
    assert group is not None, f"group {event.group} is not open"
    state.window.forget(event.group)
    for sample in group.samples(_LEASED):
        row = group.rows[sample]
        if row.attempt != event.attempt:
            continue
        state.end_lease(group.row_id(sample), row)
        row.status = _WANTED
        if event.group.is_evaluation:
            state.evaluations.num_leased -= 1
        else:
            state.unassigned[event.group] = None
    state.queue.update(group)


@_change.register
def _(event: ev.Moved, state: HubState) -> None:
    for row_id, attempt in zip(event.rows, event.attempts, strict=True):
        row = state.row(row_id)
        assert row is not None and row.status is _LEASED, f"row {row_id} is not leased"
        assert row.holder == event.source, f"row {row_id} is held by {row.holder}"
        assert row.attempt < attempt, f"{row_id}: attempt {attempt} after {row.attempt}"
        state.end_lease(row_id, row)
        state.lease({row_id: row}, event.holder)
        row.attempt = attempt
    state.incarnations[event.holder] = event.request_id >> 32
    state.num_moved += len(event.rows) * (event.source != event.holder)


@_change.register
def _(event: ev.RowReady, state: HubState) -> None:
    """Most events are of this kind: what the other rules have in functions of the state is written out in it."""
    row_id = event.row
    group = state.groups.get(row_id.group)
    assert group is not None, f"row {row_id} is not leased"
    row = group.rows[row_id.sample]
    assert row.status is _LEASED, f"row {row_id} is not leased"
    is_lost = state.lost_storage_ids and not state.lost_storage_ids.isdisjoint(event.units)
    assert not is_lost, f"row {event.row} is in a unit that is lost"
    held = state.held[row.holder]
    del held[row_id]
    if not held:
        del state.held[row.holder]
    row.status = _READY
    row.storage_ids = event.units
    is_other_version = row.version != event.version
    row.version = event.version
    row.num_tokens = event.num_tokens
    row.reward = event.reward
    row.num_versions = event.num_versions
    row.num_prompt_tokens = event.num_prompt_tokens
    row.num_drawn = event.num_drawn
    state.tokens.ended += event.num_drawn
    state.tokens.ready += event.num_drawn
    state.losses.finished += 1
    if event.num_kept:
        state.num_continued += 1
        state.tokens_kept += event.num_kept
    is_complete = True
    for each in group.rows:
        if each.status is _LEASED or each.status is _WANTED:
            is_complete = False
            break
    if is_complete or is_other_version:
        state.queue.update(group)
    state.window.row_ready()
    if is_complete:
        state.end_group(group)


@_change.register
def _(event: ev.GroupRestored, state: HubState) -> None:
    group = state.groups.get(event.group)
    if group is None:
        group = Group(event.group, state.cursor, [Row() for _ in range(state.samples_per_prompt)])
        state.groups[event.group] = group
        state.cursor += event.passed_over + 1
        state.account.leased += len(group.rows)
    for ref in event.rows:
        assert ref.row.group == event.group, f"{ref.row} is not of group {event.group}"
        assert not ref.is_partial, f"{ref.row} is unfinished"
        row = group.rows[ref.row.sample]
        assert row.status is _WANTED, f"{ref.row} is {row.status.name}"
        assert row.attempt <= ref.attempt, f"{ref.row}: attempt {ref.attempt} after {row.attempt}"
        group.rows[ref.row.sample] = Row(
            _READY, ref.attempt, ref.version, storage_ids=ref.storage_ids, num_tokens=ref.num_tokens,
            reward=ref.reward, num_versions=ref.num_versions, num_prompt_tokens=ref.num_prompt_tokens, num_drawn=ref.num_drawn,
        )  # fmt: skip
        state.tokens.restored += ref.num_drawn
        state.tokens.ready += ref.num_drawn
    if group.samples(_WANTED):
        state.unassigned[event.group] = None
    else:
        state.unassigned.pop(event.group, None)
    state.num_restored += len(event.rows)
    state.tokens.begun += event.num_begun
    state.queue.update(group)


@_change.register
def _(event: ev.PromptDropped, state: HubState) -> None:
    state.dropped.pop(event.group.prompt, None)  # the last one is the newest
    state.dropped[event.group.prompt] = event.reason
    state.passed_over.add(event.group.prompt)
    if (group := state.groups.pop(event.group, None)) is None:
        return
    assert group.step is None, f"group {event.group} is handed out"
    state.window.forget(event.group)
    rows = group.samples(_WANTED, _LEASED)
    for sample in rows:
        state.end_lease(group.row_id(sample), group.rows[sample])
    ready = group.row_ids(_READY)
    state.tokens.evicted += state.take_tokens(group)
    state.account.failed += len(rows)
    state.failures[event.reason] += len(rows)
    state.account.evicted += len(ready)
    state.losses.fail(len(rows), event.reason)
    state.losses.evict(len(ready))
    state.release(ready)
    state.unassigned.pop(event.group, None)
    state.queue.remove(event.group)


@_change.register
def _(event: ev.RowFailed, state: HubState) -> None:
    row = state.row(event.row)
    assert row is not None and row.status is _LEASED, f"row {event.row} is not leased"
    state.end_lease(event.row, row)
    row.status = _FAILED
    state.account.failed += 1
    state.tokens.ended += event.num_drawn
    state.tokens.failed += event.num_drawn
    state.failures[event.reason] += 1
    state.losses.fail(1, event.reason)
    group = state.groups[event.row.group]
    state.queue.update(group)
    state.window.row_ready()
    state.end_group(group)
    if all(row.status is _FAILED for row in group.rows):
        del state.groups[group.id]
        state.window.drop(group.id)


@_change.register
def _(event: ev.EvaluationBegun, state: HubState) -> None:
    begin_evaluation(event, state.evaluations)


@_change.register
def _(event: ev.Evaluated, state: HubState) -> None:
    if (row := state.row(event.row)) is not None:
        state.end_lease(event.row, row)
    state.tokens.ended += event.num_drawn
    state.tokens.evaluated += event.num_drawn
    end_sample(event, state.evaluations)


@_change.register
def _(event: ev.RowsLost, state: HubState) -> None:
    state.losses.lose(len(event.rows), event.reason)
    for row_id, attempt in zip(event.rows, event.attempts, strict=True):
        row = state.row(row_id)
        assert row is not None and row.attempt == attempt, f"row {row_id} has no attempt {attempt}"
        assert row.status in (_LEASED, _READY), f"row {row_id} is {row.status.name}"
        if row.status is _READY:
            state.regenerated += 1
            state.tokens.ready -= row.num_drawn
            state.tokens.lost += row.num_drawn
        group = state.groups[row_id.group]
        state.end_lease(row_id, row)
        row.reset()
        state.release([row_id])
        state.unassigned[group.id] = None
        state.window.forget(group.id)
        if group.step is not None:  # it is handed out again once it is complete again
            group.step = None
            state.in_training.remove(group.id)
        state.queue.update(group)


@_change.register
def _(event: ev.UnitLost, state: HubState) -> None:
    state.lost_storage_ids.add(event.unit)
    for group in state.groups.values():
        for sample, row in enumerate(group.rows):
            if event.unit not in row.storage_ids:
                continue
            row.storage_ids = [unit for unit in row.storage_ids if unit != event.unit]
            if not row.storage_ids and group.step is None:
                state.regenerated += 1
                state.losses.lose(1, event.reason)
                state.tokens.ready -= row.num_drawn
                state.tokens.lost += row.num_drawn
                row.reset()
                state.release([group.row_id(sample)])
                state.unassigned[group.id] = None
                state.window.forget(group.id)
                state.queue.update(group)


@_change.register
def _(event: ev.TaskHanded, state: HubState) -> None:
    attempts = dict(zip(event.rows, event.attempts, strict=True))
    for row_id, attempt in attempts.items():
        assert state.has_attempt(row_id, attempt), f"row {row_id} has no attempt {attempt} in the queue"
        assert state.groups[row_id.group].step is None, f"row {row_id} is handed out for training"
    state.tasks.setdefault(event.task, TaskRecord()).open_batch(event.number, event.consumer, attempts)


@_change.register
def _(event: ev.ColumnsReady, state: HubState) -> None:
    record = state.tasks[event.task]
    attempts = record.open_batches[event.number].attempts
    for row_id, units in zip(event.rows, event.units, strict=True):
        assert state.has_attempt(row_id, attempts[row_id]), f"row {row_id} is not in the queue any more"
        row = state.groups[row_id.group].rows[row_id.sample]
        assert units and set(units) <= set(row.storage_ids), f"row {row_id} is in {row.storage_ids}, not in {units}"
        row.storage_ids = list(units)
        row.columns |= frozenset(event.columns)
        state.queue.update(state.groups[row_id.group])
    record.close(event.number, consumed=event.rows, missing=state.missing(attempts))


@_change.register
def _(event: ev.TaskReturned, state: HubState) -> None:
    record = state.tasks[event.task]
    attempts = record.open_batches[event.number].attempts
    record.close(event.number, consumed=(), missing=state.missing(attempts))


@_change.register
def _(event: ev.GroupFiltered, state: HubState) -> None:
    group = state.groups.pop(event.group)
    state.queue.remove(event.group)
    state.window.drop(event.group)
    state.release(group.row_ids(_READY))
    assert group.is_complete and group.step is None, f"group {event.group} cannot be filtered"
    num_ready = len(group.samples(_READY))
    state.tokens.filtered += state.take_tokens(group)
    state.account.filtered += num_ready
    state.losses.filter(num_ready)


@_change.register
def _(event: ev.Handed, state: HubState) -> None:
    assert event.step == state.step, f"groups for step {event.step} while step {state.step} is trained"
    state.losses.in_vain = 0
    for group_id in event.groups:
        group = state.groups[group_id]
        assert group.is_complete and group.step is None, f"group {group_id} cannot be handed out"
        group.step = event.step
        state.in_training.append(group_id)
        state.queue.remove(group_id)


@_change.register
def _(event: ev.Trained, state: HubState) -> None:
    assert event.step == state.step, f"step {event.step} trained while step {state.step} was due"
    groups = [state.groups.pop(group_id) for group_id in state.in_training]
    rows = [row for group in groups for row in group.rows if row.status is _READY]
    if state.tasks:
        state.release(row_id for group in groups for row_id in group.row_ids(_READY))
    state.account.trained += len(rows)
    state.tokens.trained += sum([state.take_tokens(group) for group in groups])
    state.tokens_trained += sum([row.num_tokens for row in rows])
    state.staleness.update([event.step - row.version for row in rows])
    state.versions_per_trajectory.update([row.num_versions for row in rows])
    state.window.end_step(len(state.in_training), event.busy_s, event.waited_s)
    state.in_training.clear()
    state.step = state.step + 1
    state.restarts_in_step = 0
    state.losses = state.losses.next_step(event.t)


@_change.register
def _(event: ev.TrainerRestarted, state: HubState) -> None:
    """Groups that were handed out stay so: the next incarnation gets them again."""
    assert event.incarnation > state.trainer_incarnation, f"{event.incarnation} after {state.trainer_incarnation}"
    state.trainer_incarnation = event.incarnation
    state.trainer_restarts = state.trainer_restarts + 1
    state.restarts_in_step += 1
    state.num_memory_deaths += event.is_memory_full
    state.window.open()


@_change.register
def _(event: ev.Published, state: HubState) -> None:
    if event.version > state.version:
        state.window.publish(steps_late=state.step - event.version)
    if event.version >= state.version:
        state.version = event.version
        state.digest = event.digest


@_change.register
def _(event: ev.Received, state: HubState) -> None:
    """The digest is for audits."""
    if event.num_unfinished:
        state.midway["starved" if event.is_ordered else "age"] += 1


@_change.register
def _(event: ev.Checkpointed, state: HubState) -> None:
    assert event.step <= state.step, f"checkpoint of step {event.step} at step {state.step}"
    state.checkpointed = event.step


@_change.register
def _(event: ev.CheckpointDue, state: HubState) -> None:
    state.checkpoint_after = event.after


@_change.register
def _(event: ev.RolloutGone, state: HubState) -> None:
    state.tokens.gone[event.holder] = (event.drawn, event.ended)


@_change.register
def _(event: ev.Drained, state: HubState) -> None:
    state.drained.add(event.member)


@_change.register
def _(event: ev.Ending, state: HubState) -> None:
    state.ending = event


@_change.register
def _(event: ev.Ended, state: HubState) -> None:
    state.ended = event.reason


_RULES = {kind: _change.dispatch(kind) for kind in ev.Event.__subclasses__()}
"""The rules by the class of the event: looking them up here is faster than calling `_change`."""
