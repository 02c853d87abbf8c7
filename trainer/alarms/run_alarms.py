"""The alarms of a run: all watches judge each step, and the user is told what they find, a warning once in a run."""

from collections.abc import Sequence
from typing import NamedTuple

from ...comm.recipe import Recipe
from .collapse import CollapseWatch
from .cut_responses import CutResponses
from .equal_rewards import EqualRewards
from .full_cache import FullCache
from .staleness_bound import StalenessBound
from .unused_tools import UnusedTools
from .watch import Alarm, Metrics, Watch

WATCHES = (CollapseWatch, EqualRewards, CutResponses, UnusedTools, StalenessBound, FullCache)
"""Classes of watches, each called with the recipe. A new alarm is a file and an entry here."""
REPEATED_AFTER = 10
"""Steps without an alarm of a collapse after which the next one of the same cause is told again."""


class Told(NamedTuple):
    """A line for the user, and whether the alarm ends the run."""

    line: str
    text: str
    ends_run: bool = False


class RunAlarms:
    """Judges each step by its metrics. Those of the steps before a restart, given again, bring it to the same state."""

    def __init__(self, recipe: Recipe, watches: Sequence[Watch] | None = None) -> None:
        """watches: by default all, and none on emulated devices, which have no rewards and no policy."""
        if watches is None:
            watches = () if recipe.is_emulated else [watch(recipe) for watch in WATCHES]
        self._watches = watches
        self._collapse_ends_run = recipe.run.on_collapse == "stop"
        self._last_steps: dict[str, int] = {}
        """The last step with an alarm of each cause."""
        self._new: list[Alarm] = []
        self.last_collapse = ""
        """The last alarm of a collapse, with its step."""
        self.warnings: dict[str, str] = {}
        """The first warning of each cause, with its step."""

    def step(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Judge a step (counted from 0); returns the metric of each alarm that it has."""
        found = [alarm for watch in self._watches for alarm in watch.judge(metrics)]
        self._new = [alarm for alarm in found if self._is_new(step, alarm)]
        for alarm in found:
            self._last_steps[alarm.cause] = step
            text = f"at step {step + 1}: {alarm.text}"
            if alarm.is_collapse:
                self.last_collapse = text
            else:
                self.warnings.setdefault(alarm.cause, text)
        return {f"alarm/{alarm.cause}": 1.0 for alarm in found}

    def told(self, checkpoint: int) -> list[Told]:
        """What the user is told after the last step; `checkpoint`: the newest one's step, for a run that an alarm ends."""
        return [self._told(alarm, checkpoint) for alarm in self._new]

    def _is_new(self, step: int, alarm: Alarm) -> bool:
        if alarm.cause not in self._last_steps:
            return True
        return alarm.is_collapse and (self._collapse_ends_run or step > self._last_steps[alarm.cause] + REPEATED_AFTER)

    def _told(self, alarm: Alarm, checkpoint: int) -> Told:
        if not alarm.is_collapse:
            return Told(f"warning: {alarm.text}", alarm.text)
        text = alarm.text
        if self._collapse_ends_run:
            kept = f"its last checkpoint is that of step {checkpoint}" if checkpoint > 0 else "it has no checkpoint"
            text = f"{text}; run.on_collapse=stop ends the run, and {kept}"
        return Told(f"alarm: {text}", text, self._collapse_ends_run)
