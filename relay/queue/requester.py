"""A stream's conversation with the hub: it requests rows, acknowledges them, and reports missing rows."""

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...comm import threads
from ...comm.messages.queue import Answer, ColumnsAdded, RequestRows, RowBatch, RowRef, RowsNotFound
from ...comm.messages.run import Stop

if TYPE_CHECKING:
    from ...comm.mailbox import Mailbox

REPEAT_S = 2.0
"""A request is repeated after this long; the hub answers a repeated request with the same rows."""
POLL_S = 0.1
_SIGN_S = 30.0
"""After this long without rows a consumer asks the hub for a sign of life, and earlier where its deadline is short."""
_SIGNS = 4
"""Signs of life within a deadline: one that is late does not end the wait."""


class RowRequester:
    """Rank 0 requests, acknowledges and reports, so the hub hears all of it in this order."""

    def __init__(
        self,
        mailbox: "Mailbox",
        tasks: Sequence[str],
        max_tokens: int,
        deadline_s: float = float("inf"),
        *,
        num_ranks: int = 1,
        has_trees: bool = False,
    ) -> None:
        """max_tokens: a micro-batch for each of `num_ranks`; has_trees: as in `RequestRows`.

        deadline_s: seconds without a sign of life of the hub that end the consumer's wait.
        """
        self.sign_s = min(_SIGN_S, deadline_s / _SIGNS)
        self._mailbox = mailbox
        self._tasks = list(tasks)
        self._max_tokens = max_tokens
        self._least_tokens = max_tokens if num_ranks > 1 else 0
        self._has_trees = has_trees
        # Answers to an earlier incarnation of this process may still arrive.
        self._request_ids = itertools.count(int(threads.seconds() * 1e9))
        self._open_batches: set[tuple[str, int]] = set()
        self._is_closing = threading.Event()

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._is_closing.is_set()

    def close(self) -> None:
        """End this and every later request with `Stop`; the mailbox stays open."""
        self._is_closing.set()

    def request(self, step: int, received: int, evaluated: int = -1) -> Answer | Stop:
        """The hub's answer, or its `Stop`: `step` is in training, with `received` groups so far; `evaluated` as in `RequestRows`.

        Without rows a hub that is at work answers `NoRowsYet` after `sign_s`.
        """
        request_id = next(self._request_ids)
        open_batches = tuple(sorted(self._open_batches))
        request = RequestRows(
            request_id,
            self._tasks,
            step,
            received,
            open_batches,
            self._max_tokens,
            evaluated,
            has_trees=self._has_trees,
            least_tokens=self._least_tokens,
        )
        began = threads.seconds()
        sent_at = -float("inf")  # the caller of `ExperienceStream.next` holds the deadline
        while not self.is_closing:
            now = threads.seconds()
            if now - sent_at >= min(REPEAT_S, self.sign_s):
                sent_at = now
                self._mailbox.send("hub", replace(request, is_overdue=now - began >= self.sign_s))
            envelope = self._mailbox.receive(POLL_S)
            message = envelope.message if envelope else None
            if isinstance(message, Stop):
                return message
            if isinstance(message, Answer) and message.request_id == request_id:
                if isinstance(message, RowBatch):
                    self._open_batches.add((message.task, message.batch_id))
                return message
        return Stop("closed")

    def acknowledge(self, batch: RowBatch, names: Sequence[str], storage_ids: Mapping[str, list[str]]) -> None:
        """Report a batch as done: the new columns, and for each row's key the units that have them."""
        rows = batch.rows()
        held = [storage_ids.get(row.key, []) for row in rows]
        done = ColumnsAdded(batch.task, batch.batch_id, list(names), [row.row for row in rows], held)
        self._mailbox.send("hub", done)
        self._open_batches.discard((batch.task, batch.batch_id))

    def report(self, rows: Sequence[RowRef], reason: str) -> None:
        """Report rows that none of their units has; the hub ignores repeated reports."""
        self._mailbox.send("hub", RowsNotFound([row.row for row in rows], [row.attempt for row in rows], reason))
