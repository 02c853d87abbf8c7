"""A warning for runs whose policy never calls one of its tools."""

from collections.abc import Iterator
from math import ceil

from ...comm.recipe import Recipe
from .watch import STEPS, Alarm, Metrics, Streak, number

ANSWERED = "rows/answered"
"""The figure of a step, not a metric of the run: the number of its responses with tokens that an environment inserted."""


class UnusedTools:
    """Warns of a run with tools none of whose responses ever gets a tool's result."""

    RESPONSES = 300
    """If none of so many calls a tool, fewer than 1 in 100 do (with 95 % certainty), too few to learn it from."""

    def __init__(self, recipe: Recipe) -> None:
        self._names = ", ".join(path.rpartition(":")[2].rpartition(".")[2] for path in recipe.environment.tools)
        self._num_responses = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt
        self._streak = Streak(max(STEPS, ceil(self.RESPONSES / self._num_responses)))
        self._is_used = not recipe.environment.tools
        """A step had a call, or may have had one: the metrics of a process before this one do not tell."""

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        self._is_used = self._is_used or ANSWERED not in metrics or number(metrics, ANSWERED) > 0
        if self._streak.is_full(not self._is_used):
            yield Alarm(
                "unused_tools",
                f"none of the first {self._streak.length * self._num_responses} responses called a tool ({self._names}): see in the"
                " samples what the policy writes instead; it has to know the form of a call, or be told of it in the prompt"
                " (docs/use/warnings.md#unused-tools)",
            )
