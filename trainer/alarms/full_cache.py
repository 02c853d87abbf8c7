"""A warning for runs whose KV cache is too small for the trajectories that decode together."""

from collections.abc import Iterator

from ...comm.recipe import Recipe
from .watch import STEPS, Alarm, Metrics, Streak, number


class FullCache:
    """Warns of a run that computes many tokens again, because a full KV cache has dropped their keys and values."""

    SHARE = 0.25
    """Of the tokens drawn and prefilled. A cache that is full now and then, as planned for mean lengths, drops a few."""

    def __init__(self, recipe: Recipe) -> None:
        self._running = recipe.generator.max_running
        self._streak = Streak()

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        if "rollout/kv_dropped_frac" not in metrics:  # no rollout has reported within this step
            return
        share = number(metrics, "rollout/kv_dropped_frac")
        if self._streak.is_full(share > self.SHARE):
            yield Alarm(
                "full_cache",
                f"the KV cache is too small: for {STEPS} steps, more than {self.SHARE:.0%} of the tokens that the rollouts compute"
                f" ({share:.0%} in the last one) were dropped from it and have to be computed again; set a larger generator.kv_gb or"
                f" generator.gpu_share, or generator.max_running below {self._running}"
                " (docs/use/warnings.md#a-full-kv-cache)",
            )
