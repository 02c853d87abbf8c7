"""The end of a trajectory: its reward, and then its row."""

import json
from typing import TYPE_CHECKING

from ..comm.recipe import RewardSettings
from .engine.sequence import Completion
from .leases import LeasedRow, RowHolder
from .rewards.calls import ScoreRequest
from .rewards.groups import WholeGroups
from .row_writer import FinishedRow, Writer

if TYPE_CHECKING:
    from .rewards.base import Rewards


class Scoring:
    """Takes finished trajectories; used by a loop between two steps of the generator."""

    def __init__(self, rewards: "Rewards", settings: RewardSettings, leases: RowHolder, row_writer: Writer) -> None:
        self._rewards = rewards
        self._has_function = bool(settings.path)
        self._leases = leases
        self._row_writer = row_writer
        self._groups = WholeGroups(leases.held) if settings.batch == "group" else None
        self._scored: list[ScoreRequest] = []

    @property
    def backlog(self) -> int:
        """Finished trajectories beyond those that the reward functions and the storage units can take next."""
        return self._rewards.backlog + self._row_writer.backlog

    def score(self, held: LeasedRow, completion: Completion, failure: str = "") -> None:
        """Ask for the reward of a trajectory that has ended, unless its environment has given it."""
        held.completion = completion
        request = ScoreRequest(held, held.row, completion.text, completion.token_ids, held.version, failure=failure)
        if held.episode is not None:
            request.completion = held.episode.response()
            request.reward = None if self._has_function or failure else 0.0
        if failure or request.reward is not None:
            self._scored.append(request)
        elif self._groups is not None:
            self._groups.add(request)
        else:
            self._rewards.submit(request)

    def fail(self, held: LeasedRow, failure: str) -> None:
        """Finish a trajectory that has not begun."""
        self._finish(held, ScoreRequest(held, held.row, "", [], failure=failure))

    def advance(self) -> None:
        """Queue scored rows for writing, except those whose claim is unanswered; submit groups that are complete."""
        for group in self._groups.complete() if self._groups is not None else []:
            self._rewards.submit(*group)
        scored = [*self._scored, *self._rewards.finished()]
        self._scored = []
        for each in scored:
            held: LeasedRow = each.key
            if self._leases.held.get(held.row_id.number) is not held:
                continue  # leased again on another version, or leased to another rollout
            if held.claim_id:
                self._scored.append(each)
            else:
                each.reward = None if each.reward is None else each.reward + held.episode_reward
                self._finish(held, each)

    def close(self) -> None:
        """Stop; trajectories without a reward stay unscored."""
        self._rewards.close()

    def _finish(self, held: LeasedRow, scored: ScoreRequest) -> None:
        del self._leases.held[held.row_id.number]
        response = scored.completion
        text = response if isinstance(response, str) else json.dumps(response)
        self._row_writer.submit(FinishedRow(held, scored.reward, scored.failure, scored.info, text))
