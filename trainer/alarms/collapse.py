"""Alarms before learning collapses: each names its cause and the setting to change.

The reward falls last. Before it does, the policy in training is far from the one that generated its tokens, and the causes of that
look different: too high a rate moves it far from one version to the next, old tokens without a correction only over several. The
prompts of a chat model that lack the marks of its template are wrong before the first step.

The bounds are from runs of the quickstart's task and SmolLM2's (docs/develop/benchmarks.md#alarms). The gradient's norm and the
entropy gave no warning of their own there; an alarm quotes them where they are unusual.
"""

from collections import deque
from collections.abc import Iterator
from statistics import median

from ...comm.recipe import AlgorithmSettings, Recipe
from ..algorithms.kl_table import AGE_STARTS, NAMES
from .watch import Alarm, Metrics, number

MOST_DRIFT = 0.5
"""KL divergence per token from one version to the next: at most .32 in runs that learn (stories260k at 1e-3; the others .04), .8 and
more in the first stale step at 30 times the rate. A rate that is 10 times too high is not told apart: .13 to .25."""
OLD = 3.0
"""Mean staleness from which on the age of the tokens may be the cause."""
MOST_KL = 0.2
MOST_KL_IN_TRUST_REGION = 1.0
"""Of three steps the median, with tokens 8 versions old: up to .5 in runs that learn with a trust region (`token_dppo`, or the clip at
the generating policy). Without a correction .2 is passed after 8 and 9 steps, and .9 where the reward falls to 0."""
LEAST_ESS = 0.7
"""Of three steps the median: without a correction at most .4 where the divergence is above its bound."""
MOST_MISMATCH = 0.05
"""KL divergence of tokens of the version in training: about .001 with bfloat16, below 1e-8 with float32."""
SMOOTHED = 3
"""Steps of a median: one step of few responses may have a single token of a large weight."""
TEMPLATE_STEPS = 2
HISTORY = 20
"""Steps before, of which a usual norm of the gradient and a usual entropy are the medians."""
UNUSUAL = 3.0
LOOSE_CAP = 10.0
"""A cap of importance weights from which on it hardly bounds any."""


class CollapseWatch:
    """Watches for a collapse of learning. Steps of trainers that count no tokens have no alarm."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._usual: dict[str, deque[float]] = {
            name: deque(maxlen=HISTORY) for name in ("actor/grad_norm", "actor/entropy")
        }
        self._recent: dict[str, deque[float]] = {
            name: deque(maxlen=SMOOTHED) for name in ("staleness/kl", "is/ess", "mismatch/kl")
        }
        self._num_bare = 0
        """Steps in a row none of whose prompts has a mark of the model's template."""

    def judge(self, metrics: Metrics) -> list[Alarm]:
        if not any(name in metrics for name in NAMES):
            return []
        for name, values in self._recent.items():
            if name in metrics:
                values.append(number(metrics, name))
        alarms = list(self._alarms(metrics))
        for name, values in self._usual.items():
            values.append(number(metrics, name))
        return alarms

    def _alarms(self, metrics: Metrics) -> Iterator[Alarm]:
        age = number(metrics, "staleness/token_mean")
        # The divergence grows with the square of the age while the versions move in one direction, else more slowly.
        drift = number(metrics, "staleness/kl") / max(age, 1.0) ** 2
        if drift > MOST_DRIFT:
            yield Alarm("learning_rate", self._on_rate(metrics, drift), is_collapse=True)
        elif age >= OLD and self._smoothed("staleness/kl") > self._most_kl and self._smoothed("is/ess") < LEAST_ESS:
            yield Alarm("staleness", self._on_age(metrics, age), is_collapse=True)
        if "mismatch/kl" in metrics and (mismatch := self._smoothed("mismatch/kl")) > MOST_MISMATCH:
            yield Alarm("mismatch", _on_mismatch(metrics, mismatch), is_collapse=True)
        self._num_bare = self._num_bare + 1 if metrics.get("prompt/turn_frac") == 0 else 0
        if self._num_bare >= TEMPLATE_STEPS:
            yield Alarm("chat_template", self._on_template(), is_collapse=True)

    @property
    def _most_kl(self) -> float:
        """The largest healthy divergence of old tokens under the settings."""
        return MOST_KL_IN_TRUST_REGION if _has_trust_region(self._recipe.algorithm) else MOST_KL

    def _smoothed(self, name: str) -> float:
        """The median of the last steps; 0 while there are few of them."""
        values = self._recent[name]
        return median(values) if len(values) == SMOOTHED else 0.0

    def _unusual(self, metrics: Metrics) -> str:
        """The gradient's norm and the entropy, where they are far from their medians in the steps before."""
        texts = {"actor/grad_norm": "the gradient's norm", "actor/entropy": "the entropy"}
        found = ""
        for name, values in self._usual.items():
            usual = median(values) if values else 0.0
            ratio = number(metrics, name) / usual if usual else 1.0
            if not 1 / UNUSUAL < ratio < UNUSUAL:
                found += f", {texts[name]} is {ratio:.2g} times its median"
        return found

    def _on_rate(self, metrics: Metrics, drift: float) -> str:
        return (
            f"learning is about to collapse: the KL divergence from one version to the next is {drift:.2g} per token (a healthy run's is"
            f" below {MOST_DRIFT:g}){self._unusual(metrics)}: optimizer.lr={self._recipe.optimizer.lr:g} is too high; try a tenth"
        )

    def _on_age(self, metrics: Metrics, age: float) -> str:
        limited = max(number(metrics, "staleness/limited_frac"), number(metrics, "is/clip_frac"))
        return (
            f"learning is about to collapse: the tokens are {age:.1f} versions old, their KL divergence is"
            f" {self._smoothed('staleness/kl'):.2g} (healthy: below {self._most_kl:g}), their effective sample size"
            f" {self._smoothed('is/ess'):.0%}, and {limited:.0%} of them are at a bound{self._unusual(metrics)}:"
            f" {_correction(self._recipe.algorithm)}queue.max_staleness=2"
        )

    def _on_template(self) -> str:
        setting = self._recipe.data.chat_template
        cause = (
            "data.chat_template is that of another model" if setting not in ("", "tokenizer") else "they are plain text"
        )
        return (
            f"no prompt has a token with which the chat template of model.path marks turns, though the model ends its turns with one:"
            f" {cause}; set data.chat_template=tokenizer"
        )


def _has_trust_region(algorithm: AlgorithmSettings) -> bool:
    """Whether an old token stops pushing once the policy has moved far enough."""
    if algorithm.proximal == "rollout":
        return algorithm.loss != "reinforce"
    return algorithm.importance_sampling == "token_dppo"


def _correction(algorithm: AlgorithmSettings) -> str:
    """The correction for stale tokens that the settings lack, in words that the bound on their age follows."""
    if algorithm.proximal == "rollout" and algorithm.loss == "reinforce":
        return "algorithm.loss=reinforce does not correct for it with algorithm.proximal=rollout; set algorithm.loss=clip, or "
    if algorithm.proximal == "version" and algorithm.importance_sampling_cap > LOOSE_CAP:
        return f"algorithm.importance_sampling_cap={algorithm.importance_sampling_cap:g} bounds no weight; set it to 2, or "
    return "set " if _has_trust_region(algorithm) else "set algorithm.importance_sampling=token_dppo, or "


def _on_mismatch(metrics: Metrics, kl: float) -> str:
    depths = {name: number(metrics, name) for name in NAMES[len(AGE_STARTS) :] if name in metrics}
    deepest = max(depths, key=lambda name: depths[name])
    place = ""
    if len(depths) > 1 and depths[deepest] > UNUSUAL * min(depths.values()):
        place = f", most of it at the places {deepest.rpartition('/')[2]} of a response"
    return (
        f"generator and trainer compute different policies: the KL divergence is {kl:.2g} on tokens of the version in training (healthy:"
        f" below {MOST_MISMATCH:g}){place}: `headrace numerics` shows where; set generator.exact=true or model.dtype=float32"
    )
