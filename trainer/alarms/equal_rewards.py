"""A warning for runs whose rewards are equal within each group, so that they teach nothing."""

from collections.abc import Iterator

from ...comm.recipe import Recipe
from .watch import STEPS, Alarm, Metrics, Streak, number

_PAGE = "docs/use/warnings.md#equal-rewards"


class EqualRewards:
    """Warns of a run whose rewards differ in hardly any group; for advantages over a whole step, of one whose rewards are all equal."""

    SHARE = 0.95
    """Of the groups: one group in twenty that teaches is hardly any. Of groups whose responses are right by chance, as few would teach
    only if fewer than 1 response in 150 were right (with 8 samples), or more than 149."""

    def __init__(self, recipe: Recipe) -> None:
        self._is_of_group = recipe.algorithm.is_of_group
        self._is_known = self._is_of_group and recipe.batch.samples_per_prompt == 1  # the start has warned of that
        self._streak = Streak()

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        least, most = number(metrics, "reward/min"), number(metrics, "reward/max")
        teaches = number(metrics, "group/zero_std_frac") < self.SHARE if self._is_of_group else least < most
        if self._streak.is_full("reward/mean" in metrics and not teaches and not self._is_known):
            mean = number(metrics, "reward/mean")
            of = f"within at least {self.SHARE:.0%} of the groups" if self._is_of_group else "of the whole step"
            yield Alarm(
                "equal_rewards",
                f"nothing is learnt: in each of the last {STEPS} steps the rewards {of} are equal, {_which(mean, least, most)}"
                f" ({_PAGE})",
            )


def _which(mean: float, least: float, most: float) -> str:
    """Which value they have, and what to do: a step of mostly equal groups may have a few other rewards."""
    if least >= 0 and mean <= (1 - EqualRewards.SHARE) * most:
        return "namely 0: read the samples, and check the reward with `headrace run ... --try`; if it is right, take easier data"
    if most == 1 and mean >= EqualRewards.SHARE:
        return "namely 1: the policy has learnt these prompts; end the run, or take harder data"
    if least == most:
        return f"namely {mean:g}, whatever the policy writes: check the reward with `headrace run ... --try`"
    return (
        "but not those of different groups: either the reward depends on the prompt alone, or the samples of a prompt are alike; check"
        " both with `headrace run ... --try` and sampling.temperature"
    )
