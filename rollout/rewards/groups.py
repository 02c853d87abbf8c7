"""Finished samples that wait for the others of their group, for reward functions that compare within a group."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...comm.messages import GroupId
    from ..leases import LeasedRow
    from ..row_writer import FinishedRow


class WholeGroups:
    """Keeps finished samples until this rollout generates no other sample of their group; `held` are its leased rows.

    All unfinished rows of a group are on one rollout: they are leased together, move together, and come back together.
    """

    def __init__(self, held: Mapping[int, "LeasedRow"]) -> None:
        self._held = held
        self._waiting: dict[GroupId, list[FinishedRow]] = {}

    def add(self, row: "FinishedRow") -> None:
        """Keep a finished sample."""
        self._waiting.setdefault(row.held.row_id.group, []).append(row)

    def complete(self) -> "list[list[FinishedRow]]":
        """The groups that have become complete, their samples in order. Samples whose lease is gone are left out."""
        if not self._waiting:
            return []
        unfinished = {held.row_id.group for held in self._held.values() if held.completion is None}
        groups = [self._waiting.pop(group) for group in list(self._waiting) if group not in unfinished]
        kept = [[each for each in group if self._held.get(each.held.row_id.number) is each.held] for group in groups]
        return [sorted(group, key=lambda each: each.held.row_id.sample) for group in kept if group]
