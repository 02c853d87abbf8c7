"""The partial pool: the first tokens of unfinished trajectories, so that other rollouts continue those of a dead one.

Rollouts stream them into the storage units (`rollout/partial_rows.py`) and report them here (Laminar, section 3: the partial
response pool). The pool is not in the journal: a trajectory whose first tokens are lost is generated from its prompt.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ...comm.messages import DropRows, GroupId, RowId, RowsStreamed, SavedRow
from ...comm.messages.base import process_of
from ...comm.messages.leases import PartialRef
from ..journal.records import Group, RowStatus
from .context import Handler, HubContext

TIDY_S = 1.0
"""Seconds between two checks for trajectories that have ended."""


class PartialRow(NamedTuple):
    """The first tokens of a trajectory: the attempt that streamed them, their version, their number, and their units."""

    attempt: int
    version: int
    num_tokens: int
    storage_ids: list[str]

    def ref(self, row_id: RowId) -> PartialRef:
        return PartialRef(row_id.sample, row_id.partial_key(self.attempt), self.storage_ids)


class PartialPool(Handler):
    """The newest first tokens of each unfinished trajectory. It drops the bytes of those that have ended."""

    def __init__(self, context: HubContext, clock: Callable[[], float], *, mixes_versions: bool) -> None:
        """`mixes_versions`: a trajectory may continue on another version than it began on."""
        super().__init__(context)
        self.rows: dict[RowId, PartialRow] = {}
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
                self._drop(row_id, self.rows.pop(row_id))
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
                self.rows[row_id] = partial._replace(storage_ids=left)
                if not left:
                    del self.rows[row_id]

    def restore(self, saved: SavedRow) -> bool:
        """Take the first tokens of a trajectory that a resumed run has read from the disk; False if nothing needs them."""
        row = self.state.row(saved.row)
        if row is None or row.status is not RowStatus.WANTED:
            return False
        self.rows[saved.row] = PartialRow(saved.attempt, saved.version, saved.num_tokens, saved.storage_ids)
        return True

    def wanted(self, group: Group) -> dict[int, PartialRow]:
        """The wanted samples of a group that can be continued together: unless versions may mix, those of one version."""
        rows = {sample: self.rows.get(group.row_id(sample)) for sample in group.samples(RowStatus.WANTED)}
        found = {sample: row for sample, row in rows.items() if row is not None}
        if self._mixes_versions or not found:
            return found
        tokens: Counter[int] = Counter()
        for row in found.values():
            tokens[row.version] += row.num_tokens
        (version, _), *_ = tokens.most_common(1)
        return {sample: row for sample, row in found.items() if row.version == version}

    def refs(self, group: GroupId, partials: Mapping[int, PartialRow]) -> tuple[PartialRef, ...]:
        """Where a rollout finds these samples of a group."""
        return tuple(partial.ref(group.row(sample)) for sample, partial in partials.items())

    def version_of(self, partials: dict[int, PartialRow]) -> int | None:
        """The version that continues these rows; None if any may."""
        return None if self._mixes_versions else next((row.version for row in partials.values()), None)

    def give_up(self, rows: Iterable[RowId]) -> None:
        """These trajectories start again at their prompts."""
        for row_id in rows:
            if (partial := self.rows.pop(row_id, None)) is not None:
                self.num_restarted += 1
                self._drop(row_id, partial)

    def _on_streamed(self, sender: str, message: RowsStreamed) -> None:
        columns = (message.rows, message.attempts, message.versions, message.num_tokens)
        for row_id, attempt, version, num_tokens in zip(*columns, strict=True):
            new = PartialRow(attempt, version, num_tokens, message.storage_ids)
            row = self.state.row(row_id)
            is_unfinished = row is not None and row.status in (RowStatus.LEASED, RowStatus.WANTED)
            if row is None or not is_unfinished or row.attempt != attempt:
                self._drop(row_id, new)
                continue
            known = self.rows.get(row_id, new)
            self.rows[row_id] = new
            if known.attempt != attempt:
                self._drop(row_id, known)

    def _drop(self, row_id: RowId, partial: PartialRow) -> None:
        for unit in partial.storage_ids:
            self._unneeded[process_of(unit)].append(row_id.partial_key(partial.attempt))
