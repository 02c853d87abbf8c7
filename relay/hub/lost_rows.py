"""The hub's office for the copies of rows: a relay may die, and what lay there alone is generated again."""

import logging

from ...comm.messages import RowsNotFound
from ..journal import events as ev
from .context import HubContext, Routes

log = logging.getLogger(__name__)


class LostRows:
    """Knows from those who read, and from the fleet, what cannot be read any more."""

    def __init__(self, context: HubContext) -> None:
        self.context = context
        self.routes: Routes = {RowsNotFound: self._on_rows_not_found}

    def advance(self) -> None:
        """Nothing waits here."""

    def on_process_death(self, process: str, reason: str) -> None:
        """Rows belong to storage units, not to processes: see `on_storage_lost`."""

    def on_storage_lost(self, unit: str, reason: str) -> None:
        """A storage unit is gone: rows without another copy are wanted again, unless they are handed out already."""
        if unit in self.context.state.lost_storage_ids:
            return
        before = self.context.state.regenerated
        self.context.commit(ev.UnitLost(unit=unit, reason=reason))
        lost = self.context.state.regenerated - before
        log.warning("unit %s is lost (%s), and with it the last copy of %d rows", unit, reason, lost)

    def _on_rows_not_found(self, sender: str, message: RowsNotFound) -> None:
        """A reader found rows nowhere: whatever is left of them goes, and they are generated again."""
        state = self.context.state
        lost = [
            (row, attempt)
            for row, attempt in zip(message.rows, message.attempts, strict=True)
            if (known := state.row(row)) is not None and known.is_ready(attempt)
        ]
        if lost:
            self.context.drop_rows((state.group_of(row), row.sample) for row, _ in lost)
            rows, attempts = [row for row, _ in lost], [attempt for _, attempt in lost]
            self.context.commit(ev.RowsLost(rows=rows, attempts=attempts, reason=f"{sender}: {message.reason}"))
