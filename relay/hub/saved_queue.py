"""The queue on the disk: a relay writes it with each checkpoint and at the end, and a resumed run takes its rows back.

The names and figures of rows come from the hub, the bytes stay with the relays (`relay/queue/saved_queue.py`). Rows that a resumed
run cannot read are generated again.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...comm.disk import say
from ...comm.messages import QueueRestored, QueueSaved, RestoreQueue, RowRef, SaveQueue
from ...comm.messages.base import GroupId, process_of
from ..journal import events as ev
from ..journal.records import Group, RowStatus
from .context import Handler, HubContext

if TYPE_CHECKING:
    from ..queue.admission import Admission
    from .partial_pool import PartialPool
    from .prompts import Prompts

KEEPER = "relay-0"
"""The relay that writes and reads: the hub's own supervisor starts it, so the run folder of both is the same."""
MAX_ROWS = 1 << 14
"""Most rows in one order, which has to fit into a message."""
PATIENCE_S = 120.0
"""Longest wait of the leases for the rows of a resumed run; of rows that come later, those still wanted are taken."""


class SavedQueue(Handler):
    """Orders of the hub to the relay that keeps the queue, and what comes back when a run is resumed."""

    def __init__(
        self,
        context: HubContext,
        prompts: "Prompts",
        admission: "Admission",
        partials: "PartialPool",
        clock: Callable[[], float],
    ) -> None:
        super().__init__(context)
        self._clock = clock
        self._asked_at = 0.0
        self._prompts = prompts
        self._admission = admission
        self._partials = partials
        self._number = 0
        self._unread = -1
        """The step of the checkpoint whose rows are still in the file alone."""
        self.routes = {QueueSaved: self._on_saved, QueueRestored: self._on_restored}

    def save(self) -> int:
        """Order the present queue to be written with the newest checkpoint; returns the number of the order, 0 without a checkpoint.

        Rows of a later version are left out: a run that resumes there has other weights under that number. A file that this run
        could not read stays as it is, for the next run from the same checkpoint.
        """
        step = self.state.checkpointed
        if step < 0 or KEEPER not in self.context.relays:
            return 0
        if step == self._unread:
            say(f"the queue that was saved after step {step} stays on the disk, since this run did not read all of it")
            return 0
        rows = [
            RowRef(
                row_id,
                row.attempt,
                row.storage_ids,
                row.version,
                row.num_tokens,
                row.reward,
                row.num_versions,
                num_prompt_tokens=row.num_prompt_tokens,
                num_drawn=row.num_drawn,
            )
            for row_id, row in self.state.rows(RowStatus.READY)
        ]
        rows += [row for row in self._partials.rows.values() if not row.row.is_evaluation]
        kept = [row for row in rows if row.version <= step]
        if len(kept) > MAX_ROWS:
            say(f"the queue is saved without {len(kept) - MAX_ROWS} of its {len(kept)} rows: {MAX_ROWS} are the most")
        self._number += 1
        order = SaveQueue(self._number, step, self.state.cursor, kept[:MAX_ROWS])
        self.context.mailbox.send(KEEPER, order)
        return self._number

    def restore(self) -> None:
        """Order the rows to be read that were saved with the checkpoint from which the run continues; leases wait for them."""
        self.context.awaits_queue = True
        self._asked_at = self._clock()
        self.context.mailbox.send(KEEPER, RestoreQueue(self.state.checkpointed))

    def advance(self) -> None:
        if self.context.awaits_queue and self._clock() - self._asked_at > PATIENCE_S:
            self._give_up(f"no answer within {PATIENCE_S:g} s")

    def on_process_death(self, process: str, reason: str) -> None:
        """A relay that dies while it reads has lost what it read."""
        if process == KEEPER and self.context.awaits_queue:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self.context.awaits_queue = False
        self._unread = self.state.checkpointed
        say(f"the saved queue was not read by {KEEPER} ({reason}); its rows are generated again")

    def _on_saved(self, _sender: str, message: QueueSaved) -> None:
        if message.problem:
            say(f"the queue is not saved with the checkpoint: {message.problem}")

    def _on_restored(self, _sender: str, message: QueueRestored) -> None:
        """Take those rows that are still to be generated; the units drop the others."""
        self.context.awaits_queue = False
        self._unread = message.step if message.is_left else -1
        self.context.relays |= {process_of(unit) for row in message.rows for unit in row.storage_ids}
        rows: dict[GroupId, list[RowRef]] = {}
        for row in message.rows:
            rows.setdefault(row.row.group, []).append(row)
        needless: list[RowRef] = []
        ahead = self._groups_ahead(rows, message.cursor)
        for group_id, passed_over in [*((known, 0) for known in rows if known in self.state.groups), *ahead]:
            needless += self._restore_group(group_id, rows.pop(group_id, []), passed_over)
        self._drop([*needless, *(row for left in rows.values() for row in left)])
        if message.problem:
            say(f"rows of the queue are generated again: {message.problem}")
        if message.rows:
            begun = len(self._partials.rows)
            say(f"the queue continues with {self.state.num_restored} finished and {begun} unfinished trajectories")

    def _groups_ahead(self, rows: Iterable[GroupId], cursor: int) -> list[tuple[GroupId, int]]:
        """Groups that were first leased after the checkpoint, up to the last one of `rows`, and the prompts passed over before each."""
        wanted = set(rows)
        ahead: list[tuple[GroupId, int]] = []
        passed_over = 0
        for group_id in self._prompts.between(cursor):
            if group_id in wanted or self._prompts.is_offered(group_id):
                ahead.append((group_id, passed_over))
                passed_over = 0
            else:
                passed_over += 1
        while ahead and ahead[-1][0] not in wanted:
            ahead.pop()
        return ahead

    def _restore_group(self, group_id: GroupId, saved: list[RowRef], passed_over: int) -> list[RowRef]:
        """Put a group back into the queue, with its saved rows; returns those that nothing needs."""
        group = self.state.groups.get(group_id)
        ready: list[RowRef] = []
        needless: list[RowRef] = []
        for row in (row for row in saved if not row.is_partial):
            known = group.rows[row.row.sample] if group else None
            if known is None or (known.status is RowStatus.WANTED and known.attempt <= row.attempt):
                ready.append(row)
            elif known.status is not RowStatus.READY or known.attempt != row.attempt:  # else the report is repeated
                needless.append(row)
        oldest = min((row.version for row in ready), default=0)
        if ready and not self._admission.may_lease(self.state, oldest, group or Group(group_id, 0, [])):
            needless = [*needless, *ready]
            ready = []  # the bound of the staleness is lower than in the run before
        finished = {row.row for row in ready}
        begun = [
            row
            for row in saved
            if row.is_partial and row.row not in finished and self._partials.can_restore(row, group)
        ]
        num_begun = sum(row.num_drawn for row in begun)
        if ready or group is None or num_begun:
            passed_over = 0 if group else passed_over
            restored = ev.GroupRestored(group=group_id, rows=ready, passed_over=passed_over, num_begun=num_begun)
            self.context.commit(restored)
        return needless + [row for row in saved if row.is_partial and not self._partials.restore(row)]

    def _drop(self, rows: Iterable[RowRef]) -> None:
        keys: dict[str, list[str]] = {}
        for row in rows:
            for unit in row.storage_ids:
                keys.setdefault(process_of(unit), []).append(row.key)
        self.context.send_drops(keys)
