"""The hub's office for those who consume rows: complete groups go to the trainer's step, single rows to the other tasks.

Whatever an answer says can be said again from the state alone, so an answer that was lost, or a hub that was, costs nothing.
"""

from collections.abc import Iterable, Mapping

from ...comm.messages import ColumnsDone, DropRows, HandOut, RowId, StepTrained, TakeRows
from ...comm.messages.queue import GroupRef
from ..journal import events as ev
from ..journal.records import Group, RowStatus
from ..journal.task_records import TaskRecord
from ..queue.admission import Admission
from ..queue.controller import Controller, reference
from ..queue.replicated_rows import relay_of
from ..queue.tasks import TRAIN
from .context import Books, Rules
from .telemetry import Telemetry

_ROUNDS = 8
"""Micro-batches for each rank of the trainer in one hand-out: enough to fill them well, few enough that the first begins early."""


class HandOuts:
    """Who asks for rows, and who has which."""

    def __init__(
        self, books: Books, admission: Admission, telemetry: Telemetry, controllers: Mapping[str, Controller]
    ) -> None:
        self.books = books
        self.admission = admission
        self.telemetry = telemetry
        self.controllers = controllers
        self._takers: dict[str, TakeRows] = {}
        self._consumers: dict[str, set[str]] = {}
        self.rules: Rules = {TakeRows: self._on_take, StepTrained: self._on_step_trained, ColumnsDone: self._on_columns}

    def serve(self) -> None:
        """Throw out what is too stale, then hand out what is ready to those who ask."""
        self._evict()
        for consumer, request in list(self._takers.items()):
            answer = self._answer(consumer, request)
            if answer is not None:
                self.books.mailbox.send(consumer, answer)
                del self._takers[consumer]

    def on_process_death(self, process: str, reason: str) -> None:
        """A consumer is gone: its rows go to others, and what it may have added to rows that left the queue is dropped."""
        self._takers.pop(process, None)
        for consumers in self._consumers.values():
            consumers.discard(process)
        for task, record in self.books.state.tasks.items():
            for number in [n for n, hand_out in record.open.items() if hand_out.consumer == process]:
                self._drop_leftovers(record, number)
                self.books.decide(ev.TaskReturned(task=task, number=number, reason=reason))

    def _answer(self, consumer: str, request: TakeRows) -> HandOut | None:
        for task in request.tasks:
            answer = self._train(request) if task == TRAIN else self._rows(task, consumer, request)
            if answer is not None:
                return answer
        return None

    def _train(self, request: TakeRows) -> HandOut | None:
        """The groups of a step beyond those received."""
        state = self.books.state
        if request.step != state.step:
            return None  # it asks ahead
        for group in self.admission.next_groups(state, _ROUNDS * request.max_tokens):
            self.books.decide(ev.Handed(step=request.step, groups=[group.id]))
        given = [state.groups[group_id] for group_id in state.handed[request.received :]]
        if not given:
            return None
        groups = [reference(group, group.samples(RowStatus.READY)) for group in given]
        metrics = self.telemetry.metrics(state)
        total = self.admission.per_step
        return HandOut(request.step, request.received, total, groups, metrics, question=request.question)

    def _rows(self, task: str, consumer: str, request: TakeRows) -> HandOut | None:
        """A hand-out of this consumer's that it has not received, or a new one."""
        state, controller = self.books.state, self.controllers[task]
        record = state.tasks.get(task, TaskRecord())
        for number, hand_out in record.open.items():
            if hand_out.consumer == consumer and number not in request.holding:
                groups = self._still_there(hand_out.attempts)
                return HandOut(-1, 0, len(groups), groups, {}, task, number, request.question)
        groups = controller.next(state, request.max_tokens, len(self._consumers[task]))
        if not groups:
            return None
        rows = [group.row(index) for group in groups for index in range(len(group.samples))]
        attempts = [attempt for group in groups for attempt in group.attempts]
        number = record.num_hand_outs + 1
        self.books.decide(ev.TaskHanded(task=task, number=number, consumer=consumer, rows=rows, attempts=attempts))
        return HandOut(-1, 0, len(groups), groups, {}, task, number, request.question)

    def _still_there(self, attempts: Mapping[RowId, int]) -> list[GroupRef]:
        state = self.books.state
        rows = [row_id for row_id, attempt in attempts.items() if state.has_attempt(row_id, attempt)]
        groups = {state.group_of(row_id).id: state.group_of(row_id) for row_id in rows}
        return [
            reference(group, [row_id.sample for row_id in rows if state.group_of(row_id) is group])
            for group in groups.values()
        ]

    def _on_take(self, sender: str, request: TakeRows) -> None:
        self._takers[sender] = request
        for task in request.tasks:
            self._consumers.setdefault(task, set()).add(sender)

    def _on_columns(self, sender: str, done: ColumnsDone) -> None:
        """A consumer has done a hand-out; what is not its own any more is dropped again."""
        state = self.books.state
        record = state.tasks.get(done.task, TaskRecord())
        hand_out = record.open.get(done.number)
        if hand_out is None or hand_out.consumer != sender:
            return  # told twice, or given to somebody else meanwhile
        self._drop_leftovers(record, done.number)
        rows: list[RowId] = []
        kept: list[list[str]] = []
        for row_id, units in zip(done.rows, done.units, strict=True):
            if not state.has_attempt(row_id, hand_out.attempts[row_id]):
                continue
            held = state.group_of(row_id).rows[row_id.sample].units
            key = row_id.key(hand_out.attempts[row_id])
            if still := [unit for unit in held if unit in units]:
                rows.append(row_id)
                kept.append(still)
                for unit in set(held) - set(still):  # this copy lacks the columns
                    self.books.mailbox.send(relay_of(unit), DropRows([key]))
        columns = list(done.columns)
        self.books.decide(ev.ColumnsReady(task=done.task, number=done.number, columns=columns, rows=rows, units=kept))

    def _drop_leftovers(self, record: TaskRecord, number: int) -> None:
        """Rows of a hand-out that left the queue meanwhile: their consumer may have brought them to life in a unit."""
        attempts = record.open[number].attempts
        keys = [row_id.key(attempts[row_id]) for row_id in self.books.state.gone(attempts)]
        for relay in self.books.relays if keys else ():
            self.books.mailbox.send(relay, DropRows(keys))

    def _on_step_trained(self, sender: str, message: StepTrained) -> None:
        state = self.books.state
        if message.step != state.step:
            return
        groups = [state.groups[group_id] for group_id in state.handed]
        self.books.drop((group, sample) for group in groups for sample in group.samples(RowStatus.READY))
        self.books.decide(ev.Trained(step=message.step))
        self.telemetry.begin_step()

    def _evict(self) -> None:
        evict(self.books, self.admission.stale(self.books.state), "older than queue.max_staleness")


def evict(books: Books, groups: Iterable[Group], reason: str) -> None:
    """Throw groups out, finished or not; whoever still generates one of their rows is fenced off."""
    for group in list(groups):
        books.drop((group, sample) for sample in group.samples(RowStatus.READY))
        books.decide(ev.Evicted(group=group.id, reason=reason))
