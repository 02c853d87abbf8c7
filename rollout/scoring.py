"""The end of a trajectory: its reward, and then its row."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..comm.messages import GroupId
from ..comm.recipe import RewardSettings
from .engine.sequence import Completion
from .leased_row import LeasedRow
from .leases import RowHolder
from .row_writer import RowSink

if TYPE_CHECKING:
    from .load_report import TokenAccount
    from .rewards.pool import Rewards


class Scoring:
    """Takes finished trajectories; used by a loop between two steps of the generator."""

    def __init__(
        self,
        rewards: "Rewards",
        settings: RewardSettings,
        leases: RowHolder,
        row_writer: RowSink,
        tokens: "TokenAccount | None" = None,
    ) -> None:
        """tokens: the account of a rollout, which gets every trajectory that ends."""
        self._rewards = rewards
        self._has_function = bool(settings.path)
        self._leases = leases
        self._row_writer = row_writer
        self._groups = WholeGroups(leases.held) if settings.batch == "group" else None
        self._scored: list[LeasedRow] = []
        self._tokens = tokens

    @property
    def backlog(self) -> int:
        """Finished trajectories beyond those that the reward functions and the storage units can take next."""
        return self._rewards.backlog + self._row_writer.backlog

    def score(self, held: LeasedRow, completion: Completion, failure: str = "") -> None:
        """Ask for the reward of a trajectory that has ended, unless its environment has given it."""
        held.completion = completion
        held.response = completion.text
        held.failure = failure
        if held.episode is not None:
            held.response = held.episode.response()
            held.reward = None if self._has_function or failure else 0.0
        if failure or held.reward is not None:
            self._scored.append(held)
        elif self._groups is not None:
            self._groups.add(held)
        else:
            self._rewards.submit(held)

    def fail(self, held: LeasedRow, failure: str) -> None:
        """Finish a trajectory that has not begun."""
        held.failure = failure
        self._finish(held)

    def advance(self) -> None:
        """Queue scored rows for writing, except those whose claim is unanswered; submit groups that are complete."""
        for group in self._groups.complete() if self._groups is not None else []:
            self._rewards.submit(*group)
        scored = [*self._scored, *self._rewards.finished()]
        self._scored = []
        for held in scored:
            if self._leases.held.get(held.row_id.number) is not held:
                continue  # leased again on another version, or leased to another rollout
            if held.claim_id:
                self._scored.append(held)
            else:
                held.set_reward(None if held.reward is None else held.reward + held.episode_reward)
                self._finish(held)

    def close(self) -> None:
        """Stop; trajectories without a reward stay unscored."""
        self._rewards.close()

    def _finish(self, held: LeasedRow) -> None:
        del self._leases.held[held.row_id.number]
        if self._tokens is not None:
            self._tokens.end(held)
        self._row_writer.submit(held)


class WholeGroups:
    """Keeps finished samples until this rollout generates no other sample of their group; `held` are its leased rows.

    All unfinished rows of a group are on one rollout: they are leased together, move together, and come back together.
    """

    def __init__(self, held: Mapping[int, LeasedRow]) -> None:
        self._held = held
        self._waiting: dict[GroupId, list[LeasedRow]] = {}

    def add(self, row: LeasedRow) -> None:
        """Keep a finished sample."""
        self._waiting.setdefault(row.row_id.group, []).append(row)

    def complete(self) -> list[list[LeasedRow]]:
        """The groups that have become complete, their samples in order. Samples whose lease is gone are left out."""
        if not self._waiting:
            return []
        unfinished = {held.row_id.group for held in self._held.values() if held.completion is None}
        groups = [self._waiting.pop(group) for group in list(self._waiting) if group not in unfinished]
        kept = [[each for each in group if self._held.get(each.row_id.number) is each] for group in groups]
        return [sorted(group, key=lambda each: each.row_id.sample) for group in kept if group]
