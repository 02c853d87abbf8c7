"""Checks of `algorithm.*` beyond the bounds of each setting."""

from collections.abc import Iterator

from ...comm.errors import SettingError
from ...comm.recipe import CriticSettings, Recipe

_OF_A_GROUP = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Advantages against the other samples of the prompt."""


def check_algorithm(recipe: Recipe) -> list[str]:
    """Refuse settings that exclude each other; returns warnings of settings without effect."""
    algorithm, longest = recipe.algorithm, recipe.sampling.max_new_tokens
    if algorithm.kl_in == "reward" and algorithm.kl_coef == 0:
        raise SettingError("algorithm.kl_in=reward: there is no KL term; set algorithm.kl_coef")
    if algorithm.overlong_buffer > longest:
        raise SettingError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than sampling.max_new_tokens={longest}"
        )
    return list(_useless(recipe))


def _useless(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if recipe.batch.samples_per_prompt == 1 and algorithm.advantage in _OF_A_GROUP:
        yield f"algorithm.advantage={algorithm.advantage} is 0 for every response with batch.samples_per_prompt=1"
    if algorithm.advantage != "gae" and (algorithm.gamma, algorithm.lam) != (1, 1):
        yield f"algorithm.gamma and algorithm.lam have no effect on algorithm.advantage={algorithm.advantage}"
    warmup_steps = recipe.critic.warmup_steps
    if algorithm.advantage != "gae" and recipe.critic != CriticSettings():
        yield f"critic.lr, critic.clip_value and critic.warmup_steps have no effect on algorithm.advantage={algorithm.advantage}"
    elif warmup_steps >= recipe.run.steps:
        yield f"critic.warmup_steps={warmup_steps}: all of run.steps={recipe.run.steps} leave the policy as it is"
    if algorithm.clip_dual is not None and algorithm.loss in ("cispo", "reinforce"):
        yield f"algorithm.clip_dual has no effect on algorithm.loss={algorithm.loss}"
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield "algorithm.kl_estimator=k1 has a mean gradient of 0 in the loss; take k2 or k3, or algorithm.kl_in=reward"
