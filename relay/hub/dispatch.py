"""The hub's office for those who consume rows: complete groups go to the trainer's step, single rows to the other tasks.

Whatever an answer says can be said again from the state alone, so an answer that was lost, or a hub that was, costs nothing.
"""

from collections.abc import Iterable, Mapping

from ...comm.messages import ColumnsAdded, DropRows, RequestRows, RowBatch, RowId, StepTrained, TrainBatch
from ...comm.messages.queue import GroupRef
from ..journal import events as ev
from ..journal.records import Group, RowStatus
from ..journal.task_records import TaskRecord
from ..queue.admission import Admission
from ..queue.batch import TRAIN
from ..queue.controller import Controller, group_ref_of
from ..queue.replicated_rows import relay_of
from .context import HubContext, Routes
from .telemetry import FleetStats

_MICRO_BATCHES_PER_RANK = 8
"""Micro-batches for each rank of the trainer in one hand-out: enough to fill them well, few enough that the first begins early."""


class Dispatcher:
    """Who asks for rows, and who has which."""

    def __init__(
        self, context: HubContext, admission: Admission, fleet_stats: FleetStats, controllers: Mapping[str, Controller]
    ) -> None:
        self.context = context
        self.admission = admission
        self.fleet_stats = fleet_stats
        self.controllers = controllers
        self._pending_requests: dict[str, RequestRows] = {}
        self._consumers: dict[str, set[str]] = {}
        self.routes: Routes = {
            RequestRows: self._on_request,
            StepTrained: self._on_step_trained,
            ColumnsAdded: self._on_columns,
        }

    def advance(self) -> None:
        """Throw out what is too stale, then hand out what is ready to those who ask."""
        self._evict()
        for consumer, request in list(self._pending_requests.items()):
            answer = self._answer(consumer, request)
            if answer is not None:
                self.context.mailbox.send(consumer, answer)
                del self._pending_requests[consumer]

    def on_process_death(self, process: str, reason: str) -> None:
        """A consumer is gone: its rows go to others, and what it may have added to rows that left the queue is dropped."""
        self._pending_requests.pop(process, None)
        for consumers in self._consumers.values():
            consumers.discard(process)
        for task, record in self.context.state.tasks.items():
            for number in [n for n, hand_out in record.begin_receive.items() if hand_out.consumer == process]:
                self._drop_leftovers(record, number)
                self.context.commit(ev.TaskReturned(task=task, number=number, reason=reason))

    def _answer(self, consumer: str, request: RequestRows) -> RowBatch | TrainBatch | None:
        for task in request.tasks:
            answer = self._train(request) if task == TRAIN else self._rows(task, consumer, request)
            if answer is not None:
                return answer
        return None

    def _train(self, request: RequestRows) -> TrainBatch | None:
        """The groups of a step beyond those received."""
        state = self.context.state
        if request.step != state.step:
            return None  # it asks ahead
        for group in self.admission.select_groups(state, _MICRO_BATCHES_PER_RANK * request.max_tokens):
            self.context.commit(ev.Handed(step=request.step, groups=[group.id]))
        given = [state.groups[group_id] for group_id in state.in_training[request.received :]]
        if not given:
            return None
        groups = [group_ref_of(group, group.samples(RowStatus.READY)) for group in given]
        return TrainBatch(
            request_id=request.request_id, step=request.step, first=request.received, total=self.admission.per_step,
            groups=groups, metrics=self.fleet_stats.snapshot(state),
        )  # fmt: skip

    def _rows(self, task: str, consumer: str, request: RequestRows) -> RowBatch | None:
        """A hand-out of this consumer's that it has not received, or a new one."""
        state, controller = self.context.state, self.controllers[task]
        record = state.tasks.get(task, TaskRecord())
        for number, hand_out in record.begin_receive.items():
            if hand_out.consumer == consumer and number not in request.open_batches:
                groups = self._still_there(hand_out.attempts)
                return RowBatch(request_id=request.request_id, task=task, batch_id=number, groups=groups)
        groups = controller.next(state, request.max_tokens, len(self._consumers[task]))
        if not groups:
            return None
        rows = [group.row(index) for group in groups for index in range(len(group.samples))]
        attempts = [attempt for group in groups for attempt in group.attempts]
        number = record.num_batches + 1
        self.context.commit(ev.TaskHanded(task=task, number=number, consumer=consumer, rows=rows, attempts=attempts))
        return RowBatch(request_id=request.request_id, task=task, batch_id=number, groups=groups)

    def _still_there(self, attempts: Mapping[RowId, int]) -> list[GroupRef]:
        state = self.context.state
        rows = [row_id for row_id, attempt in attempts.items() if state.has_attempt(row_id, attempt)]
        groups = {state.group_of(row_id).id: state.group_of(row_id) for row_id in rows}
        return [
            group_ref_of(group, [row_id.sample for row_id in rows if state.group_of(row_id) is group])
            for group in groups.values()
        ]

    def _on_request(self, sender: str, request: RequestRows) -> None:
        self._pending_requests[sender] = request
        for task in request.tasks:
            self._consumers.setdefault(task, set()).add(sender)

    def _on_columns(self, sender: str, done: ColumnsAdded) -> None:
        """A consumer has done a hand-out; what is not its own any more is dropped again."""
        state = self.context.state
        record = state.tasks.get(done.task, TaskRecord())
        hand_out = record.begin_receive.get(done.batch_id)
        if hand_out is None or hand_out.consumer != sender:
            return  # told twice, or given to somebody else meanwhile
        self._drop_leftovers(record, done.batch_id)
        rows: list[RowId] = []
        kept: list[list[str]] = []
        for row_id, units in zip(done.rows, done.storage_ids, strict=True):
            if not state.has_attempt(row_id, hand_out.attempts[row_id]):
                continue
            held = state.group_of(row_id).rows[row_id.sample].storage_ids
            key = row_id.key(hand_out.attempts[row_id])
            if still := [unit for unit in held if unit in units]:
                rows.append(row_id)
                kept.append(still)
                for unit in set(held) - set(still):  # this copy lacks the columns
                    self.context.mailbox.send(relay_of(unit), DropRows([key]))
        columns = list(done.columns)
        self.context.commit(
            ev.ColumnsReady(task=done.task, number=done.batch_id, columns=columns, rows=rows, units=kept)
        )

    def _drop_leftovers(self, record: TaskRecord, number: int) -> None:
        """Rows of a hand-out that left the queue meanwhile: their consumer may have brought them to life in a unit."""
        attempts = record.begin_receive[number].attempts
        keys = [row_id.key(attempts[row_id]) for row_id in self.context.state.missing(attempts)]
        for relay in self.context.relays if keys else ():
            self.context.mailbox.send(relay, DropRows(keys))

    def _on_step_trained(self, sender: str, message: StepTrained) -> None:
        state = self.context.state
        if message.step != state.step:
            return
        groups = [state.groups[group_id] for group_id in state.in_training]
        self.context.drop_rows((group, sample) for group in groups for sample in group.samples(RowStatus.READY))
        self.context.commit(ev.Trained(step=message.step))
        self.fleet_stats.finish_step()

    def _evict(self) -> None:
        evict(self.context, self.admission.stale(self.context.state), "older than queue.max_staleness")


def evict(context: HubContext, groups: Iterable[Group], reason: str) -> None:
    """Throw groups out, finished or not; whoever still generates one of their rows is fenced off."""
    for group in list(groups):
        context.drop_rows((group, sample) for sample in group.samples(RowStatus.READY))
        context.commit(ev.Evicted(group=group.id, reason=reason))
