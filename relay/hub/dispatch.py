"""Hands rows to consumers: complete groups to the trainer's step, single rows to the other tasks.

An answer can be repeated from the state alone, so the loss of an answer or of the hub costs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...comm.messages import (
    CheckpointRequested,
    ColumnsAdded,
    EvaluationResult,
    EvaluationsDone,
    NoRowsYet,
    RequestRows,
    RowBatch,
    RowId,
    StepTrained,
    TrainBatch,
)
from ...comm.messages.base import GroupId, process_of
from ...comm.messages.queue import Answer, GroupRef, TrainAnswer
from ..journal import events as ev
from ..journal.records import Group, RowStatus, TaskRecord
from ..queue.admission import Admission, first_groups, num_tokens
from ..queue.batch import TRAIN
from ..queue.tasks import Task, group_ref_of, next_rows
from .context import Handler, HubContext
from .telemetry import FleetStats, Snapshot

if TYPE_CHECKING:
    from .evaluations import Evaluations

_MICRO_BATCHES_PER_RANK = (2, 8)
"""Micro-batches for each rank of the trainer in one answer: enough to fill them well, few enough that the first begins early."""
_PARTS = 8
"""Answers for a step, where that many micro-batches allow it: rows that are handed out early only grow older."""


class Dispatcher(Handler):
    """The requests for rows, and the batches that consumers work on."""

    def __init__(
        self,
        context: HubContext,
        admission: Admission,
        fleet_stats: FleetStats,
        tasks: Mapping[str, Task],
        evaluations: "Evaluations",
    ) -> None:
        super().__init__(context)
        self.evaluations = evaluations
        self.admission = admission
        self.fleet_stats = fleet_stats
        self._tasks = tasks
        self._pending_requests: dict[str, RequestRows] = {}
        self._consumers: dict[str, set[str]] = {}
        self._reported: Snapshot | None = None
        self.routes = {
            CheckpointRequested: self._on_checkpoint_request,
            RequestRows: self._on_request,
            StepTrained: self._on_step_trained,
            ColumnsAdded: self._on_columns,
        }

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer has asked for groups of the step in progress and has no answer yet.

        It asks for those of the next step while it trains, which may take any time.
        """
        requests = self._pending_requests.values()
        return any(TRAIN in request.tasks and request.step == self.state.step for request in requests)

    def advance(self) -> None:
        """Answer the requests for which rows are ready, and those that are overdue."""
        for consumer, request in list(self._pending_requests.items()):
            answer = self._answer(consumer, request)
            if answer is None and request.is_overdue:
                answer = NoRowsYet(request.request_id)
            if answer is not None:
                self.context.mailbox.send(consumer, answer)
                del self._pending_requests[consumer]

    def on_process_death(self, process: str, reason: str) -> None:
        """The batches of a dead consumer come back, and columns that it added to rows outside the queue are dropped."""
        self._pending_requests.pop(process, None)
        for consumers in self._consumers.values():
            consumers.discard(process)
        for task, record in self.state.tasks.items():
            for number in [n for n, batch in record.open_batches.items() if batch.consumer == process]:
                leftovers = self._leftovers(record, number)
                self.context.commit(ev.TaskReturned(task=task, number=number, reason=reason))
                self.context.send_drops(leftovers)

    def _answer(self, consumer: str, request: RequestRows) -> Answer | None:
        for task in request.tasks:
            answer = self._train(request) if task == TRAIN else self._rows(task, consumer, request)
            if answer is not None:
                return answer
        return None

    def _train(self, request: RequestRows) -> TrainAnswer | None:
        """Groups of the step in progress beyond those received, for one update; None for a request of the next step.

        A trainer that starts again gets the groups in the same order and in equal answers, where all of them were ready.
        """
        state = self.state
        if request.step != state.step:
            return None
        if request.step == self.admission.num_steps:
            return self._after_last_step(request)
        part = state.tokens_trained / max(state.step, 1) / _PARTS
        least, most = (number * request.max_tokens for number in _MICRO_BATCHES_PER_RANK)
        max_tokens = min(max(part, least), most)
        end = next((end for end in self.admission.update_ends if end > request.received), 0)
        chosen = self.admission.select_groups(state, max_tokens)
        if not self._is_enough(request, chosen, end):
            return None
        for group in chosen:
            self.context.commit(ev.Handed(step=request.step, groups=[group.id]))
        handed = [state.groups[group_id] for group_id in state.in_training[request.received : end]]
        given = first_groups(handed, max_tokens)
        if not given:
            return None
        groups = [group_ref_of(group, group.samples(RowStatus.READY)) for group in given]
        self._reported = self.fleet_stats.snapshot(state)
        metrics = {**self._reported.metrics, "queue/window": float(self.admission.lead(state))}
        return TrainBatch(
            request_id=request.request_id, step=request.step, first=request.received, total=self.admission.per_step,
            groups=groups, metrics=metrics, checkpoint_after=state.checkpoint_after,
            evaluation=self._next_evaluation(request),
        )  # fmt: skip

    def _is_enough(self, request: RequestRows, chosen: Sequence[Group], end: int) -> bool:
        """Whether these groups are worth a round of the trainer's ranks, each of which has whole rows and waits for all others.

        Else they wait for more, unless none is under way. `end`: the groups of the step up to its next update.
        """
        state = self.state
        has_earlier = len(state.in_training) > request.received  # it starts again, and gets what it had
        is_rest = len(state.in_training) + len(chosen) >= end
        is_all = state.num_queued == len(state.queue.ready)
        return has_earlier or is_rest or is_all or num_tokens(chosen) >= request.least_tokens

    def _after_last_step(self, request: RequestRows) -> TrainAnswer | None:
        """The metrics of one evaluation after the other, then that all are done."""
        if metrics := self._next_evaluation(request):
            return EvaluationResult(request.request_id, metrics)
        if self.evaluations.is_done:
            return EvaluationsDone(request.request_id)
        return None

    def _next_evaluation(self, request: RequestRows) -> dict[str, float]:
        """Metrics that the trainer has not received; one evaluation a step, since a step has one line of metrics."""
        results = [] if request.received else self.state.evaluations.results
        return next((result for result in results if result["eval/version"] > request.evaluated), {})

    def _rows(self, task: str, consumer: str, request: RequestRows) -> RowBatch | None:
        """A batch that this consumer was given and has not received, or a new one."""
        record = self.state.tasks.get(task, TaskRecord())
        for number, batch in record.open_batches.items():
            if batch.consumer == consumer and (task, number) not in request.open_batches:
                groups = self._still_queued(batch.attempts)
                break
        else:
            num_consumers = len(self._consumers[task])
            groups = next_rows(
                self._tasks[task], self.state, request.max_tokens, num_consumers, has_trees=request.has_trees
            )
            if not groups:
                return None
            number = record.num_batches + 1
            refs = [ref for group in groups for ref in group.rows()]
            rows = [ref.row for ref in refs]
            attempts = [ref.attempt for ref in refs]
            self.context.commit(
                ev.TaskHanded(task=task, number=number, consumer=consumer, rows=rows, attempts=attempts)
            )
        return RowBatch(request_id=request.request_id, task=task, batch_id=number, groups=groups)

    def _still_queued(self, attempts: Mapping[RowId, int]) -> list[GroupRef]:
        samples: dict[GroupId, list[int]] = {}
        for row_id, attempt in attempts.items():
            if self.state.has_attempt(row_id, attempt):
                samples.setdefault(row_id.group, []).append(row_id.sample)
        return [group_ref_of(self.state.groups[group_id], found) for group_id, found in samples.items()]

    def _on_request(self, sender: str, request: RequestRows) -> None:
        self._pending_requests[sender] = request
        for task in request.tasks:
            self._consumers.setdefault(task, set()).add(sender)

    def _on_checkpoint_request(self, sender: str, message: CheckpointRequested) -> None:
        """Every process of the run may pass on the same signal."""
        if self.state.checkpoint_after < self.state.step:
            self.context.commit(ev.CheckpointDue(after=self.state.step))

    def _on_columns(self, sender: str, done: ColumnsAdded) -> None:
        """A consumer has finished a batch: its columns count where the row is still in the queue, as the attempt given."""
        state = self.state
        record = state.tasks.get(done.task, TaskRecord())
        batch = record.open_batches.get(done.batch_id)
        if batch is None or batch.consumer != sender:
            return  # the report is repeated, or the rows went to another consumer meanwhile
        drops = self._leftovers(record, done.batch_id)
        rows: list[RowId] = []
        kept: list[list[str]] = []
        for row_id, units in zip(done.rows, done.storage_ids, strict=True):
            if not state.has_attempt(row_id, batch.attempts[row_id]):
                continue
            held = state.groups[row_id.group].rows[row_id.sample].storage_ids
            key = row_id.key(batch.attempts[row_id])
            if still := [unit for unit in held if unit in units]:
                rows.append(row_id)
                kept.append(still)
                for unit in set(held) - set(still):  # this copy lacks the columns
                    drops.setdefault(process_of(unit), []).append(key)
        self.context.commit(
            ev.ColumnsReady(task=done.task, number=done.batch_id, columns=done.columns, rows=rows, units=kept)
        )
        self.context.send_drops(drops)

    def _leftovers(self, record: TaskRecord, number: int) -> dict[str, list[str]]:
        """Rows of a batch that left the queue meanwhile, by relay: the consumer may have written columns of them to any unit."""
        attempts = record.open_batches[number].attempts
        keys = [row_id.key(attempts[row_id]) for row_id in self.state.missing(attempts)]
        return {relay: list(keys) for relay in self.context.relays if keys}

    def _on_step_trained(self, sender: str, message: StepTrained) -> None:
        if message.step != self.state.step or message.incarnation < self.state.trainer_incarnation:
            return
        groups = [self.state.groups[group_id] for group_id in self.state.in_training]
        trained = ev.Trained(step=message.step, busy_s=message.busy_s, waited_s=message.waited_s)
        self.context.commit(trained, drops=[row_id for group in groups for row_id in group.row_ids(RowStatus.READY)])
        if self._reported is not None:
            self.fleet_stats.finish_step(self._reported)
            self._reported = None
