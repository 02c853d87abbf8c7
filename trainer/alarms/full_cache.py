"""A warning for runs whose KV cache is too small for the trajectories that decode together."""

from collections import deque
from collections.abc import Iterator

from ...comm.recipe import Recipe
from .watch import Alarm, Metrics, number


class FullCache:
    """Warns of a run that computes many tokens again, because a full KV cache has dropped their keys and values."""

    STEPS = 10
    """Steps that are judged together: the rollouts report about once a second, so short steps often have no such tokens."""
    SHARE = 0.25
    """Tokens computed again for each one drawn. A cache that suffices has none; one that barely holds a single sequence of the
    quickstart has .6."""

    def __init__(self, recipe: Recipe) -> None:
        running = recipe.generator.num_slots
        self._change = f"set a larger generator.kv_gb, or generator.max_running below {running}"
        if (
            recipe.generator.kv_gb is None
        ):  # then it is planned for `max_running` trajectories, so fewer of them get less
            self._change = "set generator.kv_gb to more GB than the line `generator: ...` at the start has, or on a GPU a larger generator.gpu_share"
        self._last: deque[tuple[float, float]] = deque(maxlen=self.STEPS)
        """Tokens computed again, and drawn."""

    def judge(self, metrics: Metrics) -> Iterator[Alarm]:
        if "tokens/generated" not in metrics:
            return
        self._last.append((number(metrics, "tokens/recomputed/full_cache"), number(metrics, "tokens/generated")))
        again = sum(tokens for tokens, _ in self._last)
        share = again / max(sum(tokens for _, tokens in self._last), 1.0)
        if len(self._last) == self.STEPS and share > self.SHARE:
            yield Alarm(
                "full_cache",
                f"the KV cache is too small: in the last {self.STEPS} steps {share:.2g} tokens were computed again for each token drawn,"
                f" since it had no room for them; {self._change} (docs/use/warnings.md#a-full-kv-cache)",
            )
