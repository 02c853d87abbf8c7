"""A consumer's side of the experience queue: metadata from the hub, bytes straight from the units, fetched ahead in a thread.

    stream = ExperienceStream(mailbox, units, ["score"], columns=["response_ids"])
    for batch in stream:                       # as soon as rows are ready, until the hub ends the run
        values = score(batch["response_ids"])  # a list of one array for each row
        stream.put(batch, {"score": values})

With several ranks (`team`) the lead talks to the hub, tells the others what there is, and each fetches its own rows.
"""

import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from ..comm.errors import HeadraceError
from ..comm.mailbox import Mailbox
from ..comm.messages import ColumnsDone, GroupId, HandOut, Message, RowsMissing, Stop, TakeRows
from ..comm.queue_messages import RowRef
from ..comm.waits import waiting
from .pipeline import TRAIN
from .rounds import rounds
from .units import RowGone, Units

REPEAT_S = 2.0
"""A question is asked again after this long: the hub answers the same again."""
LOOK_S = 0.1


class RunStopped(HeadraceError):
    """The hub ended the run while this process worked or waited."""


class Team(Protocol):
    """The ranks of a task. `share` and `summed` are collectives of the stream's threads."""

    @property
    def rank(self) -> int:
        """Of this process; 0 talks to the hub."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def share(self, message: Message | None) -> Message:
        """Rank 0's message, on all ranks."""
        ...

    def summed(self, values: list[float]) -> list[float]:
        """Sums over the ranks."""
        ...


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def share(self, message: Message | None) -> Message:
        """What was said."""
        assert message is not None
        return message

    def summed(self, values: list[float]) -> list[float]:
        """The values."""
        return values


@dataclass(slots=True)
class Batch:
    """This rank's share of a hand-out: its rows in micro-batches, and their columns by key of the row.

    `hand_out` is the same on all ranks, without the groups that could not be read. All ranks have equally many
    micro-batches, some of them empty, since ranks that share one policy run together.
    """

    hand_out: HandOut
    micro_batches: list[list[RowRef]]
    columns: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task that it is for."""
        return self.hand_out.task

    @property
    def rows(self) -> list[RowRef]:
        """This rank's rows, in the order of training."""
        return [row for part in self.micro_batches for row in part]

    def without(self, groups: Collection[GroupId]) -> "Batch":
        """The batch without some of its groups; as many micro-batches as before."""
        kept = [group for group in self.hand_out.groups if group.group not in groups]
        parts = [[row for row in part if row.row.group not in groups] for part in self.micro_batches]
        return Batch(msgspec.structs.replace(self.hand_out, groups=kept), parts, self.columns)

    def __getitem__(self, column: str) -> list[np.ndarray]:
        return [self.columns[row.key][column] for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)


class ExperienceStream:
    """Batches of `tasks`, in the order of their urgency, until the hub ends the run. The module's docstring has an example.

    `steps` are the optimizer steps to take groups for, if `train` is one of the tasks; the stream ends with the last.
    """

    def __init__(
        self,
        mailbox: Mailbox | None,
        units: Units,
        tasks: Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        steps: range = range(0),
        max_tokens: int = 1 << 14,
        prefetch: int = 1,
        team: Team | None = None,
        deadline_s: float = float("inf"),
    ) -> None:
        self._mailbox = mailbox
        self._units = units
        self._tasks = list(tasks)
        self._columns = columns
        self._steps = steps
        self._max_tokens = max_tokens
        self._team: Team = team or Alone()
        self._deadline_s = deadline_s
        self._question = 0
        self._holding: set[int] = set()
        self._is_closing = threading.Event()
        self._places = threading.Semaphore(prefetch + 1)
        self._ahead: queue.Queue[Batch | Exception] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="experience stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        """Ends when the run does."""
        try:
            while True:
                yield self.next()
        except RunStopped:
            return

    def next(self) -> Batch:
        """The next batch. Raises `RunStopped` when the hub ended the run, and what the thread met."""
        with waiting("hub", f"rows for {' or '.join(self._tasks)}", self._deadline_s) as wait:
            while True:
                wait.check()
                try:
                    found = self._ahead.get(timeout=LOOK_S)
                    break
                except queue.Empty:
                    continue
        if isinstance(found, Exception):
            self._ahead.put(found)  # for whoever asks again
            raise found
        self._places.release()
        return found

    def put(self, batch: Batch, columns: Mapping[str, Sequence[np.ndarray]], team: Team | None = None) -> None:
        """Add columns to the rows of a batch, a list of one array for each row, and tell the hub that its hand-out is done.

        With several ranks a collective of `team`, which is not the one that the stream's thread uses.
        """
        among = team or Alone()
        held = {
            row.key: self._units.add(row.key, row.units, {name: column[i] for name, column in columns.items()})
            for i, row in enumerate(batch.rows)
        }
        copies = [(row.key, unit) for row in batch.hand_out.rows() for unit in row.units]
        counts = among.summed([float(unit in held.get(key, ())) for key, unit in copies])
        if among.rank == 0:
            units: dict[str, list[str]] = {key: [] for key, _ in copies}
            for (key, unit), count in zip(copies, counts, strict=True):
                units[key] += [unit] if count else []
            self._tell(batch.hand_out, list(columns), units)

    def _tell(self, hand_out: HandOut, names: list[str], units: Mapping[str, list[str]]) -> None:
        assert self._mailbox is not None
        rows = hand_out.rows()
        held = [units[row.key] for row in rows]
        self._mailbox.send("hub", ColumnsDone(hand_out.task, hand_out.number, names, [row.row for row in rows], held))
        self._holding.discard(hand_out.number)

    def close(self) -> None:
        """End the thread; the mailbox and the units stay open."""
        self._is_closing.set()
        self._thread.join()

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        step, received = next(iter(self._steps), -1), 0
        try:
            while not (self._steps and step not in self._steps):
                message = self._team.share(self._take(step, received) if self._team.rank == 0 else None)
                if isinstance(message, Stop):
                    raise RunStopped(message.reason)
                assert isinstance(message, HandOut)
                batch = self._fetch(message)
                if message.task == TRAIN:
                    received += len(batch.hand_out.groups)
                    if received == message.total:
                        step, received = step + 1, 0
                if batch.hand_out.groups:
                    self._ahead.put(batch)
                    continue
                self._places.release()
                if message.task != TRAIN and self._team.rank == 0:
                    self._tell(batch.hand_out, [], {})
        except Exception as error:  # noqa: BLE001 - whoever asks next raises it
            self._ahead.put(error)

    def _take(self, step: int, received: int) -> HandOut | Stop:
        """The next hand-out, or the word that there will be none."""
        assert self._mailbox is not None
        while not self._places.acquire(timeout=LOOK_S):
            if self._is_closing.is_set():
                return Stop("closed")
        self._question += 1
        holding = tuple(sorted(self._holding))
        question = TakeRows(self._question, self._tasks, step, received, holding, self._max_tokens * self._team.size)
        asked = -float("inf")  # who waits for this thread has the deadline: see `next`
        while True:
            if time.monotonic() - asked >= REPEAT_S:
                asked = time.monotonic()
                self._mailbox.send("hub", question)
            if (answer := self._answer()) is not None:
                return answer

    def _answer(self) -> HandOut | Stop | None:
        assert self._mailbox is not None
        letter = self._mailbox.receive(LOOK_S)
        if self._is_closing.is_set():
            return Stop("closed")
        match letter.message if letter else None:
            case Stop() as stop:
                return stop
            case HandOut(question=question) as answer if question == self._question:
                if answer.task != TRAIN:
                    self._holding.add(answer.number)
                return answer
        return None

    def _fetch(self, hand_out: HandOut) -> Batch:
        """Plan who trains what, and fetch this rank's rows; a group of which any rank misses a row is left out on all."""
        planned = rounds(hand_out.rows(), self._team.size, self._max_tokens)
        batch = Batch(hand_out, [parts[self._team.rank] for parts in planned])
        missing = {group.group: 0.0 for group in hand_out.groups}
        for row in batch.rows:
            try:
                batch.columns[row.key] = self._units.fetch(row.key, row.units, self._columns)
            except RowGone as gone:
                missing[row.row.group] = 1.0
                self._report(row, str(gone))
        counts = self._team.summed(list(missing.values()))
        lost = {group for group, count in zip(missing, counts, strict=True) if count}
        return batch.without(lost) if lost else batch

    def _report(self, row: RowRef, reason: str) -> None:
        """Any rank may tell; the hub takes the first word."""
        if self._mailbox is not None:
            self._mailbox.send("hub", RowsMissing([row.row], [row.attempt], reason))
