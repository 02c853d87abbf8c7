"""Writes finished trajectories to two storage units, then reports them: the hub learns only of rows that can be read.

No row is written for a sample of an evaluation: its score is reported.
"""

import queue
from contextlib import suppress
from typing import Protocol

from ..comm import threads
from ..comm.mailbox import Mailbox
from ..comm.waits import waiting
from ..relay.queue.replicated_rows import MOST_TOGETHER, ReplicatedRows
from ..relay.receipts import row_receipt
from .leased_row import LeasedRow
from .partial_rows import StreamedRow, write_streamed

POLL_S = 0.05


class RowSink(Protocol):
    """Takes finished trajectories."""

    @property
    def backlog(self) -> int:
        """Items that are not written yet."""
        ...

    def submit(self, row: LeasedRow) -> None: ...


class Writer(RowSink, Protocol):
    """Takes the first tokens of unfinished trajectories too."""

    def start(self) -> None: ...

    def submit(self, row: LeasedRow | list[StreamedRow]) -> None: ...

    def close(self) -> None: ...


class RowWriter:
    """A thread that writes rows, from `start` to `close`; `submit` never blocks."""

    def __init__(self, mailbox: Mailbox, storage: ReplicatedRows, deadline_s: float) -> None:
        self._mailbox = mailbox
        self._storage = storage
        self._deadline_s = deadline_s
        self._rows: queue.Queue[LeasedRow | list[StreamedRow]] = threads.new_queue()
        self._num_taken = 0
        """Items that are being written."""
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threads.new_thread(self._run, "row writer")

    @property
    def backlog(self) -> int:
        return self._rows.qsize() + self._num_taken

    def start(self) -> None:
        self._thread.start()

    def submit(self, row: LeasedRow | list[StreamedRow]) -> None:
        """Queue a trajectory, or the first tokens of some. Raises the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error
        self._rows.put(row)

    def close(self) -> None:
        """Write the queued rows, then close the connections to the units. Raises `WaitTimeout` or the thread's error."""
        self._is_closing = True
        with waiting("storage", f"{self._rows.qsize()} rows", self._deadline_s) as wait:
            wait.until(lambda: not self._thread.is_alive())
        self._storage.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not (self._is_closing and self._rows.empty()):
                together: list[LeasedRow] = []
                for item in self._take():
                    if isinstance(item, LeasedRow):
                        together.append(item)
                        continue
                    self._write(together)
                    together = []
                    if (report := write_streamed(item, self._storage)) is not None:
                        self._mailbox.send("hub", report)
                self._write(together)
                self._num_taken = 0
        except Exception as error:  # noqa: BLE001 - `submit` or `close` raises it in the loop
            self._error = error

    def _take(self) -> list[LeasedRow | list[StreamedRow]]:
        """The rows that are queued by now, in order; it waits a moment for the first."""
        taken: list[LeasedRow | list[StreamedRow]] = []
        with suppress(queue.Empty):
            taken.append(self._rows.get(timeout=POLL_S))
            while len(taken) < MOST_TOGETHER:
                taken.append(self._rows.get_nowait())
        self._num_taken = len(taken)
        return taken

    def _write(self, rows: list[LeasedRow]) -> None:
        """Write rows that are ready together, then report each."""
        new = [row for row in rows if not row.failure and not row.row_id.is_evaluation]
        columns = {row.row_id.key(row.attempt): row.columns() for row in new}
        units = self._storage.put_new(columns)
        for row in rows:
            key = row.row_id.key(row.attempt)
            receipt = row_receipt(columns[key]) if key in columns else ""
            self._mailbox.send("hub", row.report(units.get(key, []), receipt))
