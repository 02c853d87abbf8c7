"""The partial pool: the first tokens of unfinished trajectories, so that other rollouts continue those of a dead one.

Rollouts stream them into the storage units (`rollout/partial_rows.py`) and report them here (Laminar, section 3: the partial
response pool). The pool is not in the journal: a trajectory whose first tokens are lost is generated from its prompt.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from ...comm.messages import DropRows, RowId, RowRef, RowsStreamed
from ...comm.messages.base import process_of
from ..journal.records import Group, RowStatus
from .context import Handler, HubContext

TIDY_S = 1.0
"""Seconds between two checks for trajectories that have ended."""


class PartialPool(Handler):
    """The newest first tokens of each unfinished trajectory. It drops the bytes of those that have ended."""

    def __init__(self, context: HubContext, clock: Callable[[], float], *, mixes_versions: bool) -> None:
        """`mixes_versions`: a trajectory may continue on another version than it began on."""
        super().__init__(context)
        self.rows: dict[RowId, RowRef] = {}
        self.num_restarted = 0
        """Trajectories whose first tokens no rollout could use."""
        self._mixes_versions = mixes_versions
        self._clock = clock
        self._tidied_at = clock()
        self._unneeded: dict[str, list[str]] = defaultdict(list)
        self.routes = {RowsStreamed: self._on_streamed}

    def advance(self) -> None:
        """At intervals, drop what is no longer needed."""
        if self._clock() - self._tidied_at < TIDY_S:
            return
        self._tidied_at = self._clock()
        for row_id in list(self.rows):
            row = self.state.row(row_id)
            if row is None or row.status in (RowStatus.READY, RowStatus.FAILED):
                self._drop(self.rows.pop(row_id))
        for relay, keys in self._unneeded.items():
            self.context.mailbox.send(relay, DropRows(keys))
        self._unneeded.clear()

    def on_process_death(self, process: str, reason: str) -> None:
        """First tokens that a dead rollout may have written and did not report have no reader."""
        for row_id, row in self.state.held.get(process, {}).items():
            known = self.rows.get(row_id)
            if known is None or known.attempt != row.attempt:
                key = row_id.partial_key(row.attempt)
                for relay in self.context.relays:
                    self._unneeded[relay].append(key)

    def on_storage_lost(self, storage_id: str) -> None:
        """Forget what this unit alone had."""
        for row_id, partial in list(self.rows.items()):
            if storage_id in partial.storage_ids:
                left = [unit for unit in partial.storage_ids if unit != storage_id]
                self.rows[row_id] = replace(partial, storage_ids=left)
                if not left:
                    del self.rows[row_id]

    def can_restore(self, saved: RowRef, group: Group | None) -> bool:
        """Whether the first tokens of a trajectory that were read from the disk are new, and needed in this group; None for one to come."""
        return saved.row not in self.rows and (group is None or group.rows[saved.row.sample].status is RowStatus.WANTED)

    def restore(self, saved: RowRef) -> bool:
        """Take the first tokens of a trajectory that a resumed run has read from the disk; False if nothing needs them."""
        row = self.state.row(saved.row)
        if row is None or row.status is not RowStatus.WANTED:
            return False
        self.rows[saved.row] = saved
        return True

    def wanted(self, group: Group) -> dict[int, RowRef]:
        """The wanted samples of a group that can be continued together: unless versions may mix, those whose last tokens are of one version."""
        rows = {sample: self.rows.get(group.row_id(sample)) for sample in group.samples(RowStatus.WANTED)}
        found = {sample: row for sample, row in rows.items() if row is not None}
        if self._mixes_versions or not found:
            return found
        tokens: Counter[int] = Counter()
        for row in found.values():
            tokens[row.continued_by] += row.num_tokens
        (version, _), *_ = tokens.most_common(1)
        return {sample: row for sample, row in found.items() if row.continued_by == version}

    def version_of(self, partials: dict[int, RowRef]) -> int | None:
        """The version that continues these rows; None if any may."""
        return None if self._mixes_versions else next((row.continued_by for row in partials.values()), None)

    def give_up(self, rows: Iterable[RowId]) -> None:
        """These trajectories start again at their prompts."""
        for row_id in rows:
            if (partial := self.rows.pop(row_id, None)) is not None:
                self.num_restarted += 1
                self._drop(partial)

    def _on_streamed(self, sender: str, message: RowsStreamed) -> None:
        for new in message.rows:
            row = self.state.row(new.row)
            is_unfinished = row is not None and row.status in (RowStatus.LEASED, RowStatus.WANTED)
            if row is None or not is_unfinished or row.attempt != new.attempt:
                self._drop(new)
                continue
            known = self.rows.get(new.row, new)
            self.rows[new.row] = new
            if known.attempt != new.attempt:
                self._drop(known)

    def _drop(self, partial: RowRef) -> None:
        for unit in partial.storage_ids:
            self._unneeded[process_of(unit)].append(partial.key)
