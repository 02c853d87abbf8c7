"""A warning for runs whose bound on staleness keeps both the trainer and the rollouts waiting."""

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean

from ...comm.recipe import Recipe
from .watch import Alarm, Metrics, number


class StalenessBound:
    """Warns of a run most of whose rows are as old as `queue.max_staleness` allows, while both sides idle.

    That rows are as old as the bound is no fault: with a bound of 1 it is the usual case. But if neither side has enough to do, the
    bound is why: it forbids both to lease a group that would be too old by its turn, and to train one while another is due.
    """

    STEPS = 10
    """Steps that are judged together: a report of the rollouts comes about once a second, so short steps often have none."""
    IDLE = 0.25
    """Of the time, for each side. A bound costs some time always; a fourth on both sides is more than another schedule would."""

    def __init__(self, recipe: Recipe) -> None:
        self._bound = recipe.queue.max_staleness or 0  # with 0 the sides take turns, as the user has asked
        self._last: deque[Metrics] = deque(maxlen=self.STEPS)

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        if not self._bound:
            return
        self._last.append(metrics)
        rollout_idle = [number(each, "idle/rollout") for each in self._last if "idle/rollout" in each]
        if len(self._last) < self.STEPS or not rollout_idle:
            return
        at_bound = fmean(self._share_at_bound(each) for each in self._last)
        idle = (fmean(number(each, "idle/actor") for each in self._last), fmean(rollout_idle))
        if at_bound > 0.5 and min(idle) > self.IDLE:
            yield Alarm(
                "staleness_bound",
                f"{at_bound:.0%} of the responses of the last {self.STEPS} steps are as old as queue.max_staleness={self._bound} allows,"
                f" and because of this bound both sides wait: the trainer {idle[0]:.0%} of the time, the rollouts {idle[1]:.0%}; set"
                f" queue.max_staleness={self._bound + 1} (docs/use/warnings.md#staleness-at-its-bound)",
            )

    def _share_at_bound(self, metrics: Metrics) -> float:
        counts = metrics.get("staleness/hist")
        if not isinstance(counts, Mapping):
            return 0.0
        ages = {int(age): float(count) for age, count in counts.items()}
        return sum(count for age, count in ages.items() if age >= self._bound) / max(sum(ages.values()), 1.0)
