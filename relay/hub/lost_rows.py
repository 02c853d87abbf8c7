"""The hub's office for the copies of rows: a relay may die, and what lay there alone is generated again."""

import logging

from ...comm.messages import RowsMissing
from ..journal import events as ev
from .context import Books, Rules

log = logging.getLogger(__name__)


class Copies:
    """Knows from those who read, and from the fleet, what cannot be read any more."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.rules: Rules = {RowsMissing: self._on_rows_missing}

    def serve(self) -> None:
        """Nothing waits here."""

    def on_process_death(self, process: str, reason: str) -> None:
        """Rows belong to storage units, not to processes: see `on_storage_lost`."""

    def on_storage_lost(self, unit: str, reason: str) -> None:
        """A storage unit is gone: rows without another copy are wanted again, unless they are handed out already."""
        if unit in self.books.state.lost_units:
            return
        before = self.books.state.regenerated
        self.books.decide(ev.UnitLost(unit=unit, reason=reason))
        lost = self.books.state.regenerated - before
        log.warning("unit %s is lost (%s), and with it the last copy of %d rows", unit, reason, lost)

    def _on_rows_missing(self, sender: str, message: RowsMissing) -> None:
        """A reader found rows nowhere: whatever is left of them goes, and they are generated again."""
        state = self.books.state
        lost = [
            (row, attempt)
            for row, attempt in zip(message.rows, message.attempts, strict=True)
            if (known := state.row(row)) is not None and known.is_ready(attempt)
        ]
        if lost:
            self.books.drop((state.group_of(row), row.sample) for row, _ in lost)
            rows, attempts = [row for row, _ in lost], [attempt for _, attempt in lost]
            self.books.decide(ev.RowsLost(rows=rows, attempts=attempts, reason=f"{sender}: {message.reason}"))
