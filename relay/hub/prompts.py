"""The prompts in the order of the run, without those that no rollout can use or that the curriculum leaves out.

A prompt is dropped once, with its reason in the journal: its row cannot be read, or a rollout refuses it, since it leaves no room
for a response or the template rejects it. A dropped prompt is skipped in every later epoch. The curriculum is asked in each epoch.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ...comm.disk import say
from ...comm.errors import SettingError, is_power_of_ten
from ...comm.messages import GroupId, PromptRefused
from ...comm.plugins import load_object
from ...comm.recipe import DataSettings
from ..dataset.opening import open_rows
from ..dataset.order import MixedPrompts, PromptPool, PromptSource
from ..dataset.rows import row_problem
from ..journal import events as ev
from ..journal.records import RowStatus
from .context import Handler, HubContext

_LONGEST_SEARCH = 1 << 16
_LONGEST_SEARCH_S = 60.0
"""Most prompts in a row that are skipped, and most seconds for this, since the hub does nothing else meanwhile."""


class Curriculum:
    """A user's function of the steps trained so far and a row: the probability that the row is used when its turn comes."""

    def __init__(self, chance: Callable[[int, dict[str, Any]], float], seed: int) -> None:
        self._chance = chance
        self._seed = seed
        self.had_chance = False
        """Whether a row has had a probability above 0 since this was last set to false."""

    def takes(self, step: int, group_id: GroupId, row: dict[str, Any]) -> bool:
        """Whether a row is used; the same arguments give the same answer. Raises the function's errors, and `ValueError`."""
        chance = float(self._chance(step, row))
        if not 0 <= chance <= 1:
            raise ValueError(f"the probability of a row is {chance:g}; it must be from 0 to 1")
        self.had_chance |= chance > 0
        drawn = np.random.default_rng([self._seed, group_id.epoch, group_id.prompt]).random()
        return drawn < chance


def open_curriculum(path: str, seed: int) -> Curriculum | None:
    """The curriculum that `data.curriculum` names, None without one. Raises `SettingError` and the errors of the user's file."""
    return Curriculum(load_object("data.curriculum", path), seed) if path else None


def open_prompts(settings: DataSettings, seed: int) -> PromptSource:
    """The prompts of the data, in the order of a run. Raises `SettingError`."""
    each = [open_rows(msgspec.structs.replace(settings, path=path)) for path in settings.paths]
    pools = [PromptPool(rows, shuffle=settings.shuffle, seed=seed) for rows in each]
    return pools[0] if len(pools) == 1 else MixedPrompts(pools, settings.weights or [len(rows) for rows in each], seed)


class Prompts(Handler):
    """Finds the next prompt, and drops those that cannot be used."""

    def __init__(self, context: HubContext, pool: PromptSource, curriculum: Curriculum | None = None) -> None:
        super().__init__(context)
        self.pool = pool
        self._curriculum = curriculum
        self._read: tuple[GroupId | None, bytes] = (None, b"")
        """The last row that was read: it is checked, then leased."""
        self.routes = {PromptRefused: self._on_refused}

    def next(self) -> tuple[GroupId, int] | None:
        """The next group of the data, and the number of prompts passed over before it; None, and the run ends, if none can be used."""
        try:
            return self._search()
        except SettingError as error:
            self.context.failure = str(error)
            return None

    def _search(self) -> tuple[GroupId, int] | None:
        until = time.monotonic() + _LONGEST_SEARCH_S
        if self._curriculum:
            self._curriculum.had_chance = False
        for passed_over in range(_LONGEST_SEARCH):
            if passed_over >= self.pool.whole_turn and not (self._curriculum and self._curriculum.had_chance):
                break
            if time.monotonic() >= until:
                self.context.failure = f"data.path: no prompt that can be used was found in {_LONGEST_SEARCH_S:g} s"
                return None
            group_id = self.pool.group_at(self.state.cursor + passed_over)
            if self.is_offered(group_id):
                return group_id, passed_over
            if self.context.failure:
                return None
        self.context.failure = self._reason_for_none()
        return None

    def _reason_for_none(self) -> str:
        taken = f" and that data.curriculum takes at step {self.state.step}" if self._curriculum else ""
        reason = f"data.path: no prompt is left that can be used{taken}"
        if num_dropped := len(self.state.passed_over):
            reason += f"; {num_dropped} are dropped, the last one because {[*self.state.dropped.values()][-1]}"
        return reason

    def row(self, group_id: GroupId) -> bytes:
        """The row of a group, as JSON."""
        if self._read[0] != group_id:
            self._read = (group_id, self.pool.row(group_id))
        return self._read[1]

    def between(self, cursor: int) -> list[GroupId]:
        """The groups of the data from the present position up to another one, those that are passed over included."""
        return [*map(self.pool.group_at, range(self.state.cursor, cursor))]

    def is_offered(self, group_id: GroupId) -> bool:
        """Whether a prompt is given to rollouts; one whose row cannot be used is dropped here."""
        if group_id.prompt in self.state.passed_over or not self.is_usable(group_id):
            return False
        return self._curriculum is None or self._is_taken(self._curriculum, group_id, self.row(group_id))

    def is_usable(self, group_id: GroupId) -> bool:
        """Whether the row of a group can be read; else its prompt is dropped."""
        if problem := row_problem(self.row(group_id)):
            self._drop(group_id, f"row {group_id.prompt + 1} {problem}")
        return not problem

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
        group = self.state.groups.get(group_id)
        ready = group.row_ids(RowStatus.READY) if group is not None else ()
        self.context.commit(ev.PromptDropped(group=group_id, reason=reason), drops=ready)
        if is_power_of_ten(count := len(self.state.passed_over)):
            say(f"dropped prompts: {count}, the last one because {reason}")
