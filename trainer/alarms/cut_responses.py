"""A warning for runs whose responses do not fit into their longest length."""

from collections.abc import Iterator

from ...comm.recipe import Recipe
from .watch import STEPS, Alarm, Metrics, Streak, number


class CutResponses:
    """Warns of a run whose responses are nearly all cut at their longest length: such a policy cannot show its answers."""

    SHARE = 0.9
    """A policy that ends its responses is far below: at most .13 in a step of the quickstart."""

    def __init__(self, recipe: Recipe) -> None:
        self._longest = recipe.sampling.max_new_tokens
        self._streak = Streak()

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        if self._streak.is_full(number(metrics, "response_length/clip_ratio") > self.SHARE):
            yield Alarm(
                "cut_responses",
                f"in each of the last {STEPS} steps more than {self.SHARE:.0%} of the responses were cut at the maximum length;"
                f" raise sampling.max_new_tokens={self._longest}, or leave more room in the model's context"
                " (docs/use/warnings.md#cut-responses)",
            )
