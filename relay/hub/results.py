"""Rows on their way into the queue and out of it: finished rows are accepted, fenced off or filtered; lost rows come back."""

import logging
from collections.abc import Iterable

from ...comm.disk import say
from ...comm.errors import is_power_of_ten
from ...comm.messages import DropRows, RowDone, RowId, RowsNotFound
from ...comm.messages.base import is_partial, process_of, role_of
from ...comm.recipe import QueueSettings
from ..journal import events as ev
from ..journal.records import Group, RowStatus
from .context import Handler, HubContext
from .telemetry import FleetStats

log = logging.getLogger(__name__)


class Results(Handler):
    """Accepts a row only from the holder of its present attempt.

    Stored rows belong to storage units: the death of their writer does not concern them, the loss of a unit does.
    """

    def __init__(self, context: HubContext, queue: QueueSettings, fleet_stats: FleetStats) -> None:
        super().__init__(context)
        self.queue = queue
        self.fleet_stats = fleet_stats
        self.num_fenced = 0
        self.routes = {RowDone: self._on_row_done, RowsNotFound: self._on_rows_not_found}

    def on_storage_lost(self, storage_id: str, reason: str) -> None:
        """A storage unit is lost: rows without another copy are wanted again, unless they are handed out already."""
        if storage_id in self.state.lost_storage_ids:
            return
        before = self.state.regenerated
        self.context.commit(ev.UnitLost(unit=storage_id, reason=reason))
        num_lost = self.state.regenerated - before
        log.warning("storage unit %s is lost (%s); %d rows will be generated again", storage_id, reason, num_lost)

    def drop_needless(self, relay: str, keys: Iterable[str]) -> None:
        """Drop those rows in a relay's unit that nothing needs: the row has met its end, or has another attempt or other units.

        A leased row may be there already: its rollout reports it next. So may the rows of the saved queue, before their report.
        """
        if self.context.awaits_queue:
            return
        needless: list[str] = []
        for key in keys:
            row_id, attempt = RowId.of_key(key)
            row = self.state.row(row_id)
            if row is not None and row.attempt == attempt:
                is_here = relay in map(process_of, row.storage_ids) and not is_partial(key)
                if row.status is RowStatus.LEASED or (row.status is RowStatus.READY and is_here):
                    continue
            needless.append(key)
        if needless:
            self.context.mailbox.send(relay, DropRows(needless))

    def _on_row_done(self, sender: str, done: RowDone) -> None:
        self.context.relays.update(map(process_of, done.storage_ids))
        row = self.state.row(done.row)
        units = [unit for unit in done.storage_ids if unit not in self.state.lost_storage_ids]
        if row is not None and row.attempt == done.attempt and row.status in (RowStatus.READY, RowStatus.FAILED):
            return  # the report is repeated
        if row is None or row.status is not RowStatus.LEASED or row.attempt != done.attempt:
            self._fence_off(sender, done)
        elif done.failure or done.reward is None:
            self._fail(done, done.failure or "no reward")
        elif not units:
            reason = f"gone with {', '.join(done.storage_ids)}"
            self.context.commit(ev.RowsLost(rows=[done.row], attempts=[done.attempt], reason=reason))
        else:
            ready = ev.RowReady(
                row=done.row, units=units, version=done.version, num_tokens=done.num_tokens, reward=done.reward,
                num_versions=done.num_versions, num_kept=done.num_kept, num_prompt_tokens=done.num_prompt_tokens,
                num_drawn=done.num_drawn, receipt=done.receipt,
            )  # fmt: skip
            self.context.commit(ready)
        if (group := self.state.groups.get(done.row.group)) is not None:
            self._filter(group)

    def _fail(self, done: RowDone, reason: str) -> None:
        """Print each reason the first time and whenever its count is 10, 100, ..."""
        self.context.commit(ev.RowFailed(row=done.row, reason=reason, num_drawn=done.num_drawn))
        if done.broken_by:
            self.fleet_stats.count("environment/timeouts" if done.broken_by == "late" else "environment/errors")
        if is_power_of_ten(count := self.state.failures[reason]):
            say(f"failed trajectories: {count} x {reason}")

    def _filter(self, group: Group) -> None:
        """Drop a complete group that has no learning signal, if the settings say so."""
        if self.queue.filter_zero_std and group.step is None and group.is_complete:
            ready = group.samples(RowStatus.READY)
            if len({group.rows[sample].reward for sample in ready}) == 1:
                self.context.commit(ev.GroupFiltered(group=group.id), drops=group.row_ids(RowStatus.READY))

    def _fence_off(self, sender: str, done: RowDone) -> None:
        """The row has, or had, another holder meanwhile: drop the bytes of this attempt."""
        self.num_fenced += 1
        for unit in done.storage_ids:
            self.context.mailbox.send(process_of(unit), DropRows([done.row.key(done.attempt)]))
        log.info("row %s attempt %d from %s is fenced off", done.row, done.attempt, sender)

    def _on_rows_not_found(self, sender: str, message: RowsNotFound) -> None:
        """A reader found no copy of some rows: drop what is left of them; they are generated again.

        Rows in training are the trainer's alone, which may have their bytes already.
        """
        told = dict(zip(message.rows, message.attempts, strict=True))
        lost = {row_id: attempt for row_id, attempt in told.items() if self.state.has_attempt(row_id, attempt)}
        if role_of(sender) != "actor":
            lost = {row_id: attempt for row_id, attempt in lost.items() if self.state.groups[row_id.group].step is None}
        if lost:
            reason = f"{sender}: {message.reason}"
            self.context.commit(ev.RowsLost(rows=list(lost), attempts=list(lost.values()), reason=reason), drops=lost)
