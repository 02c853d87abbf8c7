"""A warning for runs whose policy never calls one of its tools."""

from collections.abc import Iterator
from math import ceil

from ...comm.recipe import Recipe
from .watch import STEPS, Alarm, Metrics, Streak, number


class UnusedTools:
    """Warns of a run with tools none of whose responses ever calls one."""

    RESPONSES = 300
    """If none of so many calls a tool, fewer than 1 in 100 do (with 95 % certainty), too few to learn it from."""

    def __init__(self, recipe: Recipe) -> None:
        self._num_responses = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt
        self._streak = Streak(max(STEPS, ceil(self.RESPONSES / self._num_responses)))
        self._is_used = False

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        if "tools/called_frac" not in metrics:  # a run without tools
            return
        self._is_used = self._is_used or number(metrics, "tools/called_frac") > 0
        if self._streak.is_full(not self._is_used):
            yield Alarm(
                "unused_tools",
                f"none of the first {self._streak.length * self._num_responses} responses called a tool: see in the samples what the"
                " policy writes instead; it has to know the form of a call, or be told of it in the prompt"
                " (docs/use/warnings.md#unused-tools)",
            )
