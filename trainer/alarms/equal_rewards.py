"""A warning for runs whose rewards are equal within each group, so that they teach nothing."""

from collections.abc import Iterator
from math import ceil, inf

from ...comm.recipe import Recipe
from .watch import STEPS, Alarm, Metrics, Streak, number

_PAGE = "docs/use/warnings.md#equal-rewards"


class EqualRewards:
    """Warns of a run whose rewards differ in hardly any group; for advantages over a whole step, of one whose rewards are all equal."""

    SHARE = 0.95
    """Of the groups: one group in twenty that teaches is hardly any. Of groups whose responses are right by chance, as few would teach
    only if fewer than 1 response in 150 were right (with 8 samples), or more than 149."""

    LEAST_GROUPS = 60
    """If none of so many groups teaches, fewer than 1 in 20 do (with 95 % certainty). A step of two groups says little."""

    def __init__(self, recipe: Recipe) -> None:
        self._is_of_group = recipe.algorithm.is_of_group
        self._is_known = self._is_of_group and recipe.batch.samples_per_prompt == 1  # the start has warned of that
        groups = recipe.batch.prompts_per_step
        self._streak = Streak(max(STEPS, ceil(self.LEAST_GROUPS / groups) if self._is_of_group else STEPS))
        self._lowest = inf
        """The lowest mean of a step so far."""
        self._highest = -inf
        """The highest reward so far."""

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        if "reward/mean" not in metrics:
            self._streak.is_full(False)
            return
        mean, least, most = (number(metrics, f"reward/{name}") for name in ("mean", "min", "max"))
        self._lowest = min(self._lowest, mean)
        self._highest = max(self._highest, most)
        teaches = number(metrics, "group/zero_std_frac") < self.SHARE if self._is_of_group else least < most
        if self._streak.is_full(not teaches and not self._is_known):
            of = f"within at least {self.SHARE:.0%} of the groups" if self._is_of_group else "of the whole step"
            yield Alarm(
                "equal_rewards",
                f"nothing is learnt: in each of the last {self._streak.length} steps the rewards {of} are equal,"
                f" {self._which(mean, least, most)} ({_PAGE})",
            )

    def _which(self, mean: float, least: float, most: float) -> str:
        """Which value they have, and what to do: a step of mostly equal groups may have a few other rewards."""
        few = (1 - self.SHARE) * (most - least)
        is_lowest = mean <= least + few and least < most
        is_highest = mean >= most - few and (least < most or self._lowest < most == self._highest)
        if most == 1 and (is_highest or least == 1):
            unless = (
                ""
                if self._lowest < 1
                else ", unless the reward is 1 whatever it writes (`headrace run ... --try` shows it)"
            )
            return f"namely 1: the policy has learnt these prompts{unless}; end the run, or take harder data"
        if is_highest:
            return (
                f"namely {most:g}: if that is the best reward that there is, the policy has learnt these prompts: end the run, or take"
                " harder data; if not, read the samples, and check the reward with `headrace run ... --try`"
            )
        if is_lowest or least == most == 0:
            return (
                f"namely {least:g}: read the samples, and check the reward with `headrace run ... --try`; if it is right, take easier"
                " data"
            )
        if least == most:
            return f"namely {mean:g}, whatever the policy writes: check the reward with `headrace run ... --try`"
        return (
            "but not those of different groups: either the reward depends on the prompt alone, or the samples of a prompt are alike;"
            " check both with `headrace run ... --try` and sampling.temperature"
        )
