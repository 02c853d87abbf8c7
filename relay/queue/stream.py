"""A consumer's side of the experience queue: metadata comes from the hub, bytes from the storage units, ahead of their use.

    stream = ExperienceStream(mailbox, storage, ["score"], columns=["response_ids"]).start()
    for batch in stream:                       # as soon as rows are ready, until the hub ends the run
        values = score(batch["response_ids"])  # a list of one array for each row
        stream.put(batch, {"score": values})

With several ranks, rank 0 talks to the hub and broadcasts its answers, and each rank fetches its own rows.
"""

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...comm import threads
from ...comm.errors import HeadraceError
from ...comm.messages.base import Message
from ...comm.messages.queue import (
    Answer,
    EvaluationResult,
    EvaluationsDone,
    GroupRef,
    NoRowsYet,
    RowBatch,
    RowRef,
    TrainBatch,
)
from ...comm.messages.run import Stop
from ...comm.waits import join_thread, waiting
from .batch import Batch
from .micro_batches import tree_rounds
from .replicated_rows import ReplicatedRows
from .requester import POLL_S, RowRequester

if TYPE_CHECKING:
    from ...comm.mailbox import Mailbox

PLACES = 2
"""Batches that wait for `next`."""
_CLOSE_S = 30.0

NeedsGradient = Callable[[GroupRef], bool]
AfterLastStep = EvaluationResult | EvaluationsDone


class RunStopped(HeadraceError):
    """The hub ended the run while this process worked or waited."""


class ThreadTeam(Protocol):
    """The ranks of a task, for the collectives of their streams' threads. Rank 0 talks to the hub."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message, on all ranks."""
        ...

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it."""
        ...


class CallerTeam(Protocol):
    """The same ranks, for the collectives of the streams' callers, in a group of their own."""

    @property
    def rank(self) -> int: ...

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks."""
        ...


class SingleRank:
    """Both teams, for a single rank."""

    rank = 0
    size = 1

    def broadcast(self, message: Message | None) -> Message:
        assert message is not None
        return message

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return values


class RowFetcher:
    """A thread that requests rows and fetches this rank's share of them ahead of `next`.

    `max_tokens` is the size of a micro-batch; rows of up to `longest_in_tree` tokens are computed together. `steps` are the
    optimizer steps to take groups for; the thread ends with the last.
    The caller has the evaluations up to version `evaluated`.
    """

    def __init__(
        self,
        requester: RowRequester,
        storage: ReplicatedRows,
        columns: Sequence[str] | None,
        team: ThreadTeam,
        *,
        max_tokens: int,
        longest_in_tree: int,
        steps: range,
        evaluated: int,
        needs_gradient: NeedsGradient,
    ) -> None:
        self._requester = requester
        self._storage = storage
        self._columns = columns
        self._team = team
        self._max_tokens = max_tokens
        self._longest_in_tree = longest_in_tree
        self._steps = steps
        self._evaluated = evaluated
        self._needs_gradient = needs_gradient
        self.num_signs = 0
        """Answers of the hub without rows so far, the same on all ranks."""
        self._free_places = threads.new_semaphore(PLACES)
        self._ahead: queue.Queue[Batch | AfterLastStep | Exception] = threads.new_queue()
        self._thread = threads.new_thread(self._run, "experience stream")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. With several ranks it ends with rank 0's."""
        self._requester.close()
        join_thread(self._thread, _CLOSE_S)

    def next(self, timeout_s: float) -> Batch | AfterLastStep | None:
        """The next batch, or the metrics of an evaluation, or None after `timeout_s`.

        Raises the thread's error, or `RunStopped`, on this and every later call.
        """
        try:
            found = self._ahead.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            self._ahead.put(found)
            raise found
        self._free_places.release()
        return found

    def _run(self) -> None:
        try:
            self._fetch_all()
        except Exception as error:  # noqa: BLE001 - the next call of `next` raises it
            self._ahead.put(error)

    def _fetch_all(self) -> None:
        """Fetch what the hub answers until the last step, and its evaluations, are complete or the run ends."""
        step = next(iter(self._steps), -1)
        received = 0
        while not (self._steps and step not in self._steps):
            message = self._team.broadcast(self._request(step, received) if self._team.rank == 0 else None)
            if isinstance(message, Stop):
                raise RunStopped(message.reason)
            assert isinstance(message, Answer)
            taken = self._put(message)
            match taken:
                case TrainBatch():
                    received = 0 if taken.ends_step else received + len(taken.groups)
                    step += taken.ends_step
                    if taken.groups:  # else the caller gets the evaluation with the next ones
                        self._note_evaluation(taken.evaluation)
                case EvaluationResult():
                    self._note_evaluation(taken.metrics)
                case EvaluationsDone():
                    return
                case NoRowsYet():
                    self.num_signs += 1
                case RowBatch():
                    pass

    def _note_evaluation(self, metrics: Mapping[str, float]) -> None:
        self._evaluated = int(metrics.get("eval/version", self._evaluated))

    def _request(self, step: int, received: int) -> Answer | Stop:
        """The hub's next answer, once there is a free place for its rows.

        Without either it returns `NoRowsYet` from time to time: the other ranks wait for this rank, with a deadline of their own.
        """
        waits_until = threads.seconds() + self._requester.sign_s
        while not self._free_places.acquire(timeout=POLL_S):
            if self._requester.is_closing:
                break
            if threads.seconds() >= waits_until:
                return NoRowsYet(0)
        answer = self._requester.request(step, received, self._evaluated)
        if isinstance(answer, NoRowsYet):
            self._free_places.release()
        return answer

    def _put(self, message: Answer) -> Answer:
        """Keep an answer for `next`, its rows fetched; returns it without the groups that are lost."""
        if isinstance(message, NoRowsYet):
            return message
        if not isinstance(message, RowBatch | TrainBatch):
            self._ahead.put(message)
            return message
        batch = self._fetch(message)
        if batch.row_batch.groups:
            self._ahead.put(batch)
            return batch.row_batch
        self._free_places.release()
        if isinstance(batch.row_batch, RowBatch) and self._team.rank == 0:
            self._requester.acknowledge(batch.row_batch, [], {})
        return batch.row_batch

    def _fetch(self, row_batch: RowBatch | TrainBatch) -> Batch:
        """Plan the micro-batches of all ranks and fetch this rank's. If any rank misses a row, all ranks leave out its group."""
        kinds: dict[bool, list[RowRef]] = {True: [], False: []}
        for group in row_batch.groups:
            kinds[self._needs_gradient(group)] += group.rows()
        sizes = (self._team.size, self._max_tokens, self._longest_in_tree)
        planned, forward = (tree_rounds(kinds[kind], *sizes) for kind in (True, False))
        parts = [of_ranks[self._team.rank] for of_ranks in planned + forward]
        batch = Batch(row_batch, parts, num_forward=len(forward), has_trees=self._longest_in_tree > 0)
        batch.columns, reasons = self._storage.get_rows(batch.rows, self._columns)
        flags = self._team.true_anywhere([row.key in reasons for row in row_batch.rows()])
        lost = [row for row, is_lost in zip(row_batch.rows(), flags, strict=True) if is_lost]
        if not lost:
            return batch
        if self._team.rank == 0:
            # Its next request counts without these groups, so the hub has to hear of them before.
            self._requester.report(lost, next(iter(reasons.values()), "another rank found no copy"))
        return batch.without({row.row.group for row in lost})


class Stream(Protocol):
    """A source of batches, as the trainer's loop uses it."""

    def start(self) -> object: ...

    def next(self) -> Batch | AfterLastStep: ...

    def put(self, batch: Batch, columns: Mapping[str, Sequence[np.ndarray]]) -> None: ...

    def close(self) -> None: ...


class ExperienceStream:
    """Batches of `tasks`, the first in the list first, until the hub ends the run. The module's docstring has an example.

    `steps` are the optimizer steps to take groups for, if `train` is one of the tasks; the stream ends with the last.
    The caller has the evaluations up to version `evaluated`. Micro-batches have up to `max_tokens` tokens, as `tree_rounds` counts them for
    `longest_in_tree`. Rows of groups that are not `needs_gradient` are the last ones of
    their batch, in micro-batches of their own.
    """

    def __init__(
        self,
        mailbox: "Mailbox",
        storage: ReplicatedRows,
        tasks: Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        steps: range = range(0),
        max_tokens: int = 1 << 14,
        longest_in_tree: int = 0,
        evaluated: int = -1,
        needs_gradient: NeedsGradient = lambda _: True,
        thread_team: ThreadTeam | None = None,
        caller_team: CallerTeam | None = None,
        deadline_s: float = float("inf"),
    ) -> None:
        team = thread_team or SingleRank()
        self._storage = storage
        self._what = f"rows for {' or '.join(tasks)}"
        self._team: CallerTeam = caller_team or SingleRank()
        self._deadline_s = deadline_s
        self._requester = RowRequester(
            mailbox, tasks, max_tokens * team.size, deadline_s, num_ranks=team.size, has_trees=longest_in_tree > 0
        )
        self._fetcher = RowFetcher(
            self._requester, storage, columns, team,
            max_tokens=max_tokens, longest_in_tree=longest_in_tree, steps=steps, evaluated=evaluated,
            needs_gradient=needs_gradient,
        )  # fmt: skip

    def start(self) -> "ExperienceStream":
        """Begin to request and fetch; returns the stream."""
        self._fetcher.start()
        return self

    def close(self) -> None:
        """End the thread; the mailbox and the storage stay open."""
        self._fetcher.close()

    def __iter__(self) -> Iterator[Batch]:
        """Batches until the hub ends the run."""
        try:
            while True:
                if isinstance(batch := self.next(), Batch):
                    yield batch
        except RunStopped:
            return

    def next(self) -> Batch | AfterLastStep:
        """The next batch; after the last step an evaluation's metrics, and that there are no more.

        Waits as long as the hub is at work, which itself ends a run without progress: each of its answers restarts the deadline.
        Raises `RunStopped` when the hub ended the run, `WaitTimeout` after a silence of `deadline_s`, and the thread's error if it
        failed.
        """
        while True:
            num_signs = self._fetcher.num_signs
            with waiting("hub", self._what, self._deadline_s) as wait:
                while num_signs == self._fetcher.num_signs:
                    if (found := self._fetcher.next(POLL_S)) is not None:
                        return found
                    wait.check()

    def put(self, batch: Batch, columns: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Add columns to the rows of a batch, a list of one array for each row, and acknowledge the batch.

        With several ranks a collective of `caller_team`.
        """
        assert isinstance(batch.row_batch, RowBatch), f"{batch.task} adds no columns"
        values = {row.key: {name: column[i] for name, column in columns.items()} for i, row in enumerate(batch.rows)}
        held = self._storage.add_columns(batch.rows, values)
        copies = [(row.key, unit) for row in batch.row_batch.rows() for unit in row.storage_ids]
        counts = self._team.all_reduce_sum([float(unit in held.get(key, ())) for key, unit in copies])
        if self._team.rank == 0:
            storage_ids: dict[str, list[str]] = {}
            for (key, unit), count in zip(copies, counts, strict=True):
                storage_ids.setdefault(key, []).extend([unit] if count else [])
            self._requester.acknowledge(batch.row_batch, list(columns), storage_ids)
