"""Checks of `algorithm.*` and `optimizer.*` beyond the bounds of each setting."""

import math
from collections.abc import Iterator
from pathlib import Path

from ....comm.errors import SettingError
from ....comm.recipe import AlgorithmSettings, BatchSettings, CriticSettings, LoraSettings, OptimizerSettings, Recipe
from ....trainer.memory import PolicySizes
from ..model_files import read_config

_USUAL_RATES = ((50e6, math.inf), (500e6, 5e-5), (math.inf, 1e-5))
"""Largest usual learning rate when all weights are trained, by number of parameters: a smaller policy tolerates a higher rate."""
_ADAPTER_FACTOR = 10
"""How much higher the usual rate of an adapter is ("LoRA Without Regret", thinkingmachines.ai, 2025)."""
_ADAPTER_ROOM = 2
"""An adapter is warned of above this multiple of its usual rate, which is known less well."""
_RATE_PAGE = "docs/use/warnings.md#a-high-learning-rate"


def check_algorithm(recipe: Recipe) -> list[str]:
    """Refuse settings that contradict each other; returns warnings about settings without effect."""
    algorithm = recipe.algorithm
    longest = recipe.sampling.max_new_tokens
    if algorithm.kl_in == "reward" and algorithm.kl_coef == 0:
        raise SettingError("algorithm.kl_in=reward has no effect while algorithm.kl_coef is 0; set algorithm.kl_coef")
    if algorithm.overlong_buffer > longest:
        raise SettingError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than sampling.max_new_tokens={longest}"
        )
    if recipe.queue.filter_zero_std and recipe.batch.samples_per_prompt == 1:
        raise SettingError(
            "queue.filter_zero_std=true: with batch.samples_per_prompt=1 the rewards of each group are equal, so all are"
            " dropped; set it to false, or take more samples"
        )
    return [*_useless(recipe), *_without_ratio(algorithm, recipe.batch), *_without_weight(algorithm)]


def _changed(settings: AlgorithmSettings, *names: str) -> list[str]:
    """The settings among these that differ from their defaults, by their full names."""
    default = AlgorithmSettings()
    return [f"algorithm.{name}" for name in names if getattr(settings, name) != getattr(default, name)]


def _without_ratio(algorithm: AlgorithmSettings, batch: BatchSettings) -> Iterator[str]:
    """Losses and clip bounds whose ratio is 1 for each token: all are REINFORCE's gradient, times the importance weight."""
    if algorithm.loss == "reinforce":
        if bounds := _changed(algorithm, "clip_low", "clip_high"):
            yield f"{', '.join(bounds)}: no effect on algorithm.loss=reinforce"
        return
    has_several_updates = batch.updates_per_version * batch.passes > 1
    if algorithm.proximal == "rollout" or has_several_updates or ":" in algorithm.loss:
        return
    # A weight of whole responses is GSPO's, whatever the ratio.
    is_by_sequence = algorithm.importance_sampling.startswith("sequence") and algorithm.loss == "gspo"
    dual = () if algorithm.loss == "cispo" else ("clip_dual",)
    names = _changed(algorithm, "clip_low", "clip_high", *dual)
    if algorithm.loss != "clip" and not is_by_sequence:
        names.insert(0, f"algorithm.loss={algorithm.loss}")
    if names:
        yield (
            f"{', '.join(names)}: no effect, since with algorithm.proximal={algorithm.proximal} and one update for each"
            " version the ratio is 1 for every token; set algorithm.proximal=rollout for the ratio to the policy that"
            " generated, or more batch.updates_per_version or batch.passes"
        )


def _without_weight(algorithm: AlgorithmSettings) -> Iterator[str]:
    """Settings of importance weights, and of the policy between, that change nothing."""
    weights = _changed(algorithm, "importance_sampling", "importance_sampling_cap")
    if algorithm.proximal == "rollout" and weights:
        yield f"{', '.join(weights)}: no effect with algorithm.proximal=rollout, whose weights are 1"


def _useless(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    default = AlgorithmSettings()
    if algorithm.advantage != "grpo" and algorithm.scale_rewards != default.scale_rewards:
        yield f"algorithm.scale_rewards has no effect on algorithm.advantage={algorithm.advantage}"
    if algorithm.overlong_buffer == 0 and algorithm.overlong_penalty != default.overlong_penalty:
        yield "algorithm.overlong_penalty has no effect with algorithm.overlong_buffer=0"
    if algorithm.kl_coef == 0 and algorithm.kl_estimator != default.kl_estimator:
        yield "algorithm.kl_estimator has no effect with algorithm.kl_coef=0"
    if recipe.batch.samples_per_prompt == 1 and algorithm.is_of_group:
        yield f"algorithm.advantage={algorithm.advantage} is 0 for every response with batch.samples_per_prompt=1"
    if algorithm.advantage != "gae" and (algorithm.gamma, algorithm.lam) != (1, 1):
        yield f"algorithm.gamma and algorithm.lam have no effect on algorithm.advantage={algorithm.advantage}"
    warmup_steps = recipe.critic.warmup_steps
    if algorithm.advantage != "gae" and recipe.critic != CriticSettings():
        yield f"critic.lr, critic.clip_value and critic.warmup_steps have no effect on algorithm.advantage={algorithm.advantage}"
    elif warmup_steps >= recipe.run.steps:
        yield f"critic.warmup_steps={warmup_steps} covers all of run.steps={recipe.run.steps}, so the policy is never trained"
    if algorithm.clip_dual is not None and algorithm.loss in ("cispo", "reinforce"):
        yield f"algorithm.clip_dual has no effect on algorithm.loss={algorithm.loss}"
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield "algorithm.kl_estimator=k1 has a mean gradient of 0 in the loss; take k2 or k3, or algorithm.kl_in=reward"


def check_optimizer(optimizer: OptimizerSettings, num_steps: int) -> None:
    """Refuse settings of the optimizer that cannot work; raises `SettingError`."""
    if optimizer.min_lr_ratio and optimizer.lr_schedule != "cosine":
        raise SettingError(f"optimizer.min_lr_ratio: only with lr_schedule=cosine, not {optimizer.lr_schedule}")
    if optimizer.lr_schedule == "polynomial" and optimizer.lr <= 1e-7:
        raise SettingError(f"optimizer.lr: lr_schedule=polynomial ends at 1e-7, so it cannot begin at {optimizer.lr:g}")
    if optimizer.warmup_steps >= num_steps > 1 and optimizer.lr_schedule != "constant":
        raise SettingError(
            f"optimizer.warmup_steps: {optimizer.warmup_steps} of run.steps={num_steps} leave no steps after the warm-up"
        )
    if optimizer.name != "adamw":
        from ....trainer.learners.optimizer import optimizer_class

        optimizer_class(optimizer.name)


def check_rate(optimizer: OptimizerSettings, lora: LoraSettings, folder: Path) -> list[str]:
    """A warning about a learning rate at which a pretrained model forgets what it knows."""
    lr = optimizer.lr
    if lr <= min(rate for _, rate in _USUAL_RATES):
        return []
    try:
        size = PolicySizes.of(read_config(folder)).num_parameters
    except SettingError:  # only for the estimate
        return []
    most = next(rate for parameters, rate in _USUAL_RATES if size <= parameters)
    if lora.rank:
        usual = f"{1e-6 * _ADAPTER_FACTOR:g} to {most * _ADAPTER_FACTOR:g} is usual"
        if lr <= most * _ADAPTER_FACTOR * _ADAPTER_ROOM:
            return []
        return [
            f"optimizer.lr={lr:g} is high for an adapter of a model of {size / 1e6:,.0f}M weights; {usual} ({_RATE_PAGE})"
        ]
    if lr <= most:
        return []
    usual = f"1e-6 to {most:g} is usual, more with lora.rank"
    return [f"optimizer.lr={lr:g} is high for all {size / 1e6:,.0f}M weights of model.path; {usual} ({_RATE_PAGE})"]
