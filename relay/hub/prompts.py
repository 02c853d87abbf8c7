"""The prompts in the order of the run, without those that no rollout can use or that the curriculum leaves out.

A prompt is dropped once, with its reason in the journal: its row cannot be read, or a rollout refuses it, since it leaves no room
for a response or the template refuses it. Every later turn of a dropped prompt passes it over. The curriculum is asked in each turn.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ...comm.messages import GroupId, PromptRefused
from ...comm.plugins import load_object
from ...comm.recipe import Recipe
from ..dataset import MixedPrompts, PromptPool, row_problem
from ..journal import events as ev
from ..journal.records import RowStatus
from .context import Handler, HubContext, is_power_of_ten

_LONGEST_SEARCH = 1 << 16
"""Most prompts in a row that are passed over, since the hub does nothing else meanwhile."""


class Curriculum:
    """A user's function of the steps trained so far and a row: the chance that the row is taken when its turn comes."""

    def __init__(self, chance: Callable[[int, dict[str, Any]], float], seed: int) -> None:
        self._chance = chance
        self._seed = seed

    def takes(self, step: int, group_id: GroupId, row: dict[str, Any]) -> bool:
        """Whether a row is taken: the same answer to the same question. Raises the function's errors, and `ValueError`."""
        chance = float(self._chance(step, row))
        if not 0 <= chance <= 1:
            raise ValueError(f"the chance of a row is {chance:g}; it is from 0 to 1")
        drawn = np.random.default_rng([self._seed, group_id.epoch, group_id.prompt]).random()
        return drawn < chance


def open_curriculum(recipe: Recipe) -> Curriculum | None:
    """The curriculum of a recipe, None without one. Raises `SettingError` and the errors of the user's file."""
    path = recipe.data.curriculum
    return Curriculum(load_object("data.curriculum", path), recipe.run.seed) if path else None


class Prompts(Handler):
    """Finds the next prompt, and drops those that cannot be used."""

    def __init__(
        self, context: HubContext, pool: PromptPool | MixedPrompts, curriculum: Curriculum | None = None
    ) -> None:
        super().__init__(context)
        self.pool = pool
        self._curriculum = curriculum
        self.routes = {PromptRefused: self._on_refused}

    def next(self) -> tuple[GroupId, int] | None:
        """The next group of the data, and the number of prompts passed over before it. Without any the run ends: None."""
        for passed_over in range(min(2 * len(self.pool), _LONGEST_SEARCH)):  # a whole epoch is among two
            group_id = self.pool.group_at(self.state.cursor + passed_over)
            if self.is_offered(group_id):
                return group_id, passed_over
            if self.context.failure:
                return None
        taken = f" and that data.curriculum takes at step {self.state.step}" if self._curriculum else ""
        self.context.failure = f"data.path: no prompt is left that can be used{taken}"
        return None

    def row(self, group_id: GroupId) -> msgspec.Raw:
        """The row of a group, as JSON."""
        return self.pool.row(group_id)

    def between(self, cursor: int) -> list[GroupId]:
        """The groups of the data from the present position up to another one, those that are passed over included."""
        return [self.pool.group_at(position) for position in range(self.state.cursor, cursor)]

    def is_offered(self, group_id: GroupId) -> bool:
        """Whether a prompt is given to rollouts; one whose row cannot be used is dropped here."""
        if group_id.prompt in self.state.dropped:
            return False
        row = bytes(self.pool.row(group_id))
        if problem := row_problem(row):
            self._drop(group_id, f"row {group_id.prompt + 1} {problem}")
            return False
        return self._curriculum is None or self._is_taken(self._curriculum, group_id, row)

    def _is_taken(self, curriculum: Curriculum, group_id: GroupId, row: bytes) -> bool:
        try:
            return curriculum.takes(self.state.step, group_id, msgspec.json.decode(row))
        except Exception as error:  # noqa: BLE001 - the run ends with any error of the user's function
            self.context.failure = f"data.curriculum: row {group_id.prompt + 1}: {type(error).__name__}: {error}"
            return False

    def _on_refused(self, _sender: str, message: PromptRefused) -> None:
        group = self.state.groups.get(message.group)
        held = [] if group is None else [group.rows[sample] for sample in group.samples(RowStatus.LEASED)]
        # Another attempt: the group has another holder by now.
        if any(row.attempt == message.attempt for row in held):
            self._drop(message.group, message.reason)

    def _drop(self, group_id: GroupId, reason: str) -> None:
        """Print a reason the first time and whenever the count is 10, 100, ..."""
        self.context.commit(ev.PromptDropped(group=group_id, reason=reason))
        if is_power_of_ten(count := len(self.state.dropped)):
            print(f"dropped prompts: {count}, the last one because {reason}", flush=True)
