"""A consumer's side of the experience queue: metadata from the hub, bytes straight from the units, fetched ahead in a thread.

    stream = ExperienceStream(mailbox, units, ["score"], columns=["response_ids"]).start()
    for batch in stream:                       # as soon as rows are ready, until the hub ends the run
        values = score(batch["response_ids"])  # a list of one array for each row
        stream.put(batch, {"score": values})

With several ranks the lead talks to the hub and shares each hand-out with the others, and each rank fetches its own rows.
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from ...comm.errors import HeadraceError
from ...comm.mailbox import Mailbox
from ...comm.messages import ColumnsAdded, Message, RequestRows, RowBatch, RowsNotFound, Stop, TrainBatch
from ...comm.messages.queue import RowRef
from ...comm.waits import waiting
from .balance import rounds
from .batch import Batch
from .replicated_rows import ReplicatedRows, RowNotFound

REPEAT_S = 2.0
"""A question is asked again after this long: the hub answers the same again."""
POLL_S = 0.1


class RunStopped(HeadraceError):
    """The hub ended the run while this process worked or waited."""


class ThreadTeam(Protocol):
    """The ranks of a task, for the collectives of their streams' threads."""

    @property
    def rank(self) -> int:
        """Of this process; 0 talks to the hub."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message, on all ranks."""
        ...

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it."""
        ...


class CallerTeam(Protocol):
    """The same ranks, for the collectives of the streams' callers: their group is not the threads'."""

    @property
    def rank(self) -> int:
        """Of this process; 0 talks to the hub."""
        ...

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks."""
        ...


class SingleRank:
    """A single rank: both teams."""

    rank, size = 0, 1

    def broadcast(self, message: Message | None) -> Message:
        """The message."""
        assert message is not None
        return message

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """The flags."""
        return list(flags)

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """The values."""
        return values


class RowRequester:
    """A stream's talk with the hub: asks for hand-outs, acknowledges them, and reports rows that are missing.

    Rank 0 asks and acknowledges; any rank reports.
    """

    def __init__(self, mailbox: Mailbox, tasks: Sequence[str], max_tokens: int) -> None:
        self._mailbox = mailbox
        self._tasks = list(tasks)
        self._max_tokens = max_tokens
        self._question = 0
        self._holding: set[int] = set()
        self._is_closing = threading.Event()

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing.is_set()

    def close(self) -> None:
        """Let the present and every later request end with `Stop`; the mailbox stays open."""
        self._is_closing.set()

    def request(self, step: int, received: int) -> RowBatch | TrainBatch | Stop:
        """The next hand-out, or the reason why there is none: `step` is in training, with `received` groups so far."""
        self._question += 1
        holding = tuple(sorted(self._holding))
        request = RequestRows(self._question, self._tasks, step, received, holding, self._max_tokens)
        asked = -float("inf")  # the deadline is that of `ExperienceStream.next`
        while not self.is_closing:
            if time.monotonic() - asked >= REPEAT_S:
                asked = time.monotonic()
                self._mailbox.send("hub", request)
            letter = self._mailbox.receive(POLL_S)
            match letter.message if letter else None:
                case Stop() as stop:
                    return stop
                case RowBatch() | TrainBatch() as batch if batch.request_id == self._question:
                    if isinstance(batch, RowBatch):
                        self._holding.add(batch.batch_id)
                    return batch
        return Stop("closed")

    def acknowledge(self, hand_out: RowBatch, names: Sequence[str], units: Mapping[str, list[str]]) -> None:
        """Tell the hub that a hand-out is done: the new columns, and for each row's key the units that have them."""
        rows = hand_out.rows()
        held = [units.get(row.key, []) for row in rows]
        done = ColumnsAdded(hand_out.task, hand_out.batch_id, list(names), [row.row for row in rows], held)
        self._mailbox.send("hub", done)
        self._holding.discard(hand_out.batch_id)

    def report(self, row: RowRef, reason: str) -> None:
        """Tell the hub that a row is in none of its units; it takes the first report."""
        self._mailbox.send("hub", RowsNotFound([row.row], [row.attempt], reason))


class RowFetcher:
    """A stream's bytes: a thread that takes hand-outs from the requester and fetches this rank's rows ahead of `next`.

    `max_tokens` is the size of a micro-batch. `steps` are the optimizer steps to take groups for; the thread ends with the last.
    """

    def __init__(
        self,
        requester: RowRequester,
        units: ReplicatedRows,
        columns: Sequence[str] | None,
        team: ThreadTeam,
        *,
        max_tokens: int,
        steps: range,
        prefetch: int,
    ) -> None:
        self._requester = requester
        self._units = units
        self._columns = columns
        self._team = team
        self._max_tokens = max_tokens
        self._steps = steps
        self._places = threading.Semaphore(prefetch + 1)
        self._ahead: queue.Queue[Batch | Exception] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="experience stream", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. With several ranks it ends when rank 0's does."""
        self._requester.close()
        self._thread.join()

    def next(self, timeout_s: float) -> Batch | None:
        """The next batch; None if there is none yet. Raises the thread's error, or `RunStopped`, each time again."""
        try:
            found = self._ahead.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            self._ahead.put(found)
            raise found
        self._places.release()
        return found

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - the next call of `next` raises it
            self._ahead.put(error)

    def _follow(self) -> None:
        """Take hand-out after hand-out until the last step is complete or the run ends."""
        step, received = next(iter(self._steps), -1), 0
        while not (self._steps and step not in self._steps):
            message = self._team.broadcast(self._take(step, received) if self._team.rank == 0 else None)
            if isinstance(message, Stop):
                raise RunStopped(message.reason)
            assert isinstance(message, RowBatch | TrainBatch)
            batch = self._fetch(message)
            if isinstance(message, TrainBatch):
                received += len(batch.row_batch.groups)
                if received == message.total:
                    step, received = step + 1, 0
            if batch.row_batch.groups:
                self._ahead.put(batch)
                continue
            self._places.release()
            if isinstance(batch.row_batch, RowBatch) and self._team.rank == 0:
                self._requester.acknowledge(batch.row_batch, [], {})

    def _take(self, step: int, received: int) -> RowBatch | TrainBatch | Stop:
        """The next hand-out, once there is a place for it."""
        while not self._places.acquire(timeout=POLL_S):
            if self._requester.is_closing:
                break
        return self._requester.request(step, received)

    def _fetch(self, hand_out: RowBatch | TrainBatch) -> Batch:
        """Plan the micro-batches of all ranks and fetch this rank's; if any rank misses a row, all leave out its group."""
        planned = rounds(hand_out.rows(), self._team.size, self._max_tokens)
        batch = Batch(hand_out, [parts[self._team.rank] for parts in planned])
        missing = {group.group: False for group in hand_out.groups}
        for row in batch.rows:
            try:
                batch.columns[row.key] = self._units.get_row(row.key, row.storage_ids, self._columns)
            except RowNotFound as gone:
                missing[row.row.group] = True
                self._requester.report(row, str(gone))
        flags = self._team.true_anywhere(list(missing.values()))
        lost = [group for group, is_lost in zip(missing, flags, strict=True) if is_lost]
        return batch.without(lost) if lost else batch


class ExperienceStream:
    """Batches of `tasks`, in the order of their urgency, until the hub ends the run. The module's docstring has an example.

    `steps` are the optimizer steps to take groups for, if `train` is one of the tasks; the stream ends with the last.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        storage: ReplicatedRows,
        tasks: Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        steps: range = range(0),
        max_tokens: int = 1 << 14,
        prefetch: int = 1,
        thread_team: ThreadTeam | None = None,
        caller_team: CallerTeam | None = None,
        deadline_s: float = float("inf"),
    ) -> None:
        team = thread_team or SingleRank()
        self._storage = storage
        self._waited_for = f"rows for {' or '.join(tasks)}"
        self._team: CallerTeam = caller_team or SingleRank()
        self._deadline_s = deadline_s
        self._requester = RowRequester(mailbox, tasks, max_tokens * team.size)
        self._fetcher = RowFetcher(
            self._requester, storage, columns, team, max_tokens=max_tokens, steps=steps, prefetch=prefetch
        )

    def start(self) -> "ExperienceStream":
        """Begin to ask and to fetch ahead; returns the stream."""
        self._fetcher.start()
        return self

    def close(self) -> None:
        """End the thread; the mailbox and the units stay open."""
        self._fetcher.close()

    def __iter__(self) -> Iterator[Batch]:
        """Ends when the run does."""
        try:
            while True:
                yield self.next()
        except RunStopped:
            return

    def next(self) -> Batch:
        """The next batch. Raises `RunStopped` when the hub ended the run, and the error of the thread if it failed."""
        with waiting("hub", self._waited_for, self._deadline_s) as wait:
            while (batch := self._fetcher.next(POLL_S)) is None:
                wait.check()
        return batch

    def put(self, batch: Batch, columns: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Add columns to the rows of a batch, a list of one array for each row, and tell the hub that its hand-out is done.

        With several ranks a collective of `caller_team`.
        """
        assert isinstance(batch.row_batch, RowBatch), f"{batch.task} adds no columns"
        held = {
            row.key: self._storage.add_columns(
                row.key, row.storage_ids, {name: column[i] for name, column in columns.items()}
            )
            for i, row in enumerate(batch.rows)
        }
        copies = [(row.key, unit) for row in batch.row_batch.rows() for unit in row.storage_ids]
        counts = self._team.all_reduce_sum([float(unit in held.get(key, ())) for key, unit in copies])
        if self._team.rank == 0:
            units: dict[str, list[str]] = {}
            for (key, unit), count in zip(copies, counts, strict=True):
                units.setdefault(key, []).extend([unit] if count else [])
            self._requester.acknowledge(batch.row_batch, list(columns), units)
