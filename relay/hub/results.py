"""The hub's office for finished trajectories: what counts, what is fenced off, what is filtered."""

import logging

from ...comm.messages import DropRows, RowDone
from ...comm.recipe import QueueSettings
from ..journal import events as ev
from ..journal.state import Group, RowStatus
from ..queue.replicated_rows import relay_of
from .context import HubContext, Routes
from .dispatch import evict

log = logging.getLogger(__name__)


class Results:
    """Takes the word of those who hold a row's present attempt, and of nobody else."""

    def __init__(self, context: HubContext, queue: QueueSettings) -> None:
        self.context = context
        self.queue = queue
        self.num_fenced = 0
        self.routes: Routes = {RowDone: self._on_row_done}

    def advance(self) -> None:
        """Nothing waits here."""

    def on_process_death(self, process: str, reason: str) -> None:
        """What has arrived does not depend on who brought it."""

    def _on_row_done(self, sender: str, done: RowDone) -> None:
        self.context.relays.update(map(relay_of, done.storage_ids))
        row = self.context.state.row(done.row)
        units = [unit for unit in done.storage_ids if unit not in self.context.state.lost_storage_ids]
        if row is None or row.status is not RowStatus.LEASED or row.attempt != done.attempt:
            self._fence_off(sender, done)
        elif done.failure or done.reward is None:
            self.context.commit(ev.RowFailed(row=done.row, reason=done.failure or "no reward"))
        elif not units:
            reason = f"gone with {', '.join(done.storage_ids)}"
            self.context.commit(ev.RowsLost(rows=[done.row], attempts=[done.attempt], reason=reason))
        else:
            self.context.commit(
                ev.RowReady(
                    row=done.row,
                    units=units,
                    version=done.version,
                    num_tokens=done.num_tokens,
                    reward=done.reward,
                    num_versions=done.num_versions,
                )
            )
        group = self.context.state.groups.get(done.row.group)
        if group is not None and self.queue.on_failed == "drop" and group.samples(RowStatus.FAILED):
            evict(self.context, [group], "a member failed")
            return
        if group is not None and group.step is None and group.is_complete and self._has_no_signal(group):
            self.context.drop_rows((group, sample) for sample in group.samples(RowStatus.READY))
            self.context.commit(ev.GroupFiltered(group=group.id))

    def _fence_off(self, sender: str, done: RowDone) -> None:
        """Somebody else has the row by now, or had: these bytes are nobody's."""
        self.num_fenced += 1
        for unit in done.storage_ids:
            self.context.mailbox.send(relay_of(unit), DropRows([done.row.key(done.attempt)]))
        log.info("row %s attempt %d from %s is fenced off", done.row, done.attempt, sender)

    def _has_no_signal(self, group: Group) -> bool:
        rewards = {group.rows[sample].reward for sample in group.samples(RowStatus.READY)}
        return self.queue.filter_zero_std and len(rewards) == 1
