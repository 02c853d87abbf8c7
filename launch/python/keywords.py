"""Settings as a Python caller writes them: dotted names, sections as dicts, short names, and those of TRL and verl.

A name of TRL or verl is taken only where it means exactly what a setting here means. Any other one is answered with the name here.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import inspect as kinds

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..config.load import LAB, known_settings
from ..config.peer_names import PEERS
from ..config.values import members_of

_LIKE_TRL = """adam_beta1 adam_beta2 beta delta epsilon_high eval_steps gradient_checkpointing learning_rate lora_alpha lora_r
    lora_target_modules lr_scheduler_type mask_truncated_completions max_completion_length max_steps model_name_or_path
    num_generations num_generations_eval output_dir reward_funcs reward_weights save_steps save_total_limit shuffle_dataset vllm_importance_sampling_cap
    vllm_importance_sampling_mode"""
"""TRL's settings that mean the same as those which `peer_names` gives for them, value by value."""
_FROM_PEERS = {
    **{name: PEERS["TRL"][name] for name in _LIKE_TRL.split()},
    # Its trainer's arguments, and words that more than one section here has.
    "adam_epsilon": "optimizer.eps",
    "eval_dataset": "eval.path",
    "temperature": "sampling.temperature",
    "train_dataset": "data.path",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    # verl's, whole: `critic.optim.lr` is another one.
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.clip_dual",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_agg",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.ppo_epochs": "batch.passes",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "batch.samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p",
    "algorithm.adv_estimator": "algorithm.advantage",
    "data.max_response_length": "sampling.max_new_tokens",
    "data.prompt_key": "data.prompt_column",
    "data.train_batch_size": "batch.prompts_per_step",
    "data.train_files": "data.path",
    "data.val_files": "eval.path",
    "trainer.default_local_dir": "run.dir",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.total_training_steps": "run.steps",
}
_WORDS: Mapping[str, tuple[str, Mapping[Any, str]]] = {
    "scale_rewards": ("algorithm.scale_rewards", {True: "group", False: "none"}),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.scale_rewards", {True: "group", False: "none"}),
    "loss_type": (
        "algorithm.loss_agg",
        {
            "bnpo": "token-mean",
            "dapo": "token-mean",
            "dr_grpo": "seq-mean-token-sum-norm",
            "grpo": "seq-mean-token-mean",
        },
    ),
}
"""Their settings with other words for the same values."""
_BOTH_CLIPS = ("epsilon", "actor_rollout_ref.actor.clip_ratio")
"""Bounds on both sides; the settings of one side go before them."""
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_TRL_BATCH = 8
"""TRL's samples on each device, unless they are given."""

Values = dict[str, Any]


def dotted_settings(*given: Mapping[str, Any], saved: Recipe | None = None) -> Values:
    """The value of each setting by its dotted name. Unknown names stay as they are, for `refuse_unknown`.

    saved: the settings of a run that continues, by default those of a new one, for what counts in units of another setting.
    Raises `SettingError` for a setting that is given twice or a short name with several meanings.
    """
    values: Values = {}
    origins: dict[str, str] = {}
    pairs = [pair for layer in given for pair in _flat(layer)]
    flat = dict(pairs)
    for name, value in pairs:
        if name in (*_BATCH, *_BOTH_CLIPS):
            continue
        setting, meant = _setting_of(name, value)
        if setting in values:
            raise SettingError(f"{setting} is given twice, as {origins[setting]} and as {name}")
        values[setting] = plain(meant)
        origins[setting] = name
    both = [name for name in _BOTH_CLIPS if name in flat]
    if len(both) > 1:
        raise SettingError(f"algorithm.clip_low is given twice, as {both[0]} and as {both[1]}")
    for name in both:
        values = dict.fromkeys(("algorithm.clip_low", "algorithm.clip_high"), plain(flat[name])) | values
    if batch := {name: flat[name] for name in _BATCH if name in flat}:
        if "batch.prompts_per_step" in values:
            raise SettingError(
                f"batch.prompts_per_step is given twice, as {origins['batch.prompts_per_step']} and by {next(iter(batch))}"
            )
        values["batch.prompts_per_step"] = _prompts_per_step(batch, values, saved or Recipe())
    return values


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings by section, as a recipe file has them. Raises `SettingError` for a section that is given as one value."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        place = sections
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise SettingError(f"{name}: {part} is given as a section and as one value, {place!r}")
        if isinstance(place.get(last), dict):
            raise SettingError(f"{name} is given as a section and as one value, {value!r}")
        place[last] = value
    return sections


def plain(value: Any) -> Any:
    """Paths and data types of torch as text, enums as their values, numbers of numpy and torch as Python's, also within lists and
    dicts; anything else as it is."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if type(value) is dict:  # a data set with splits is another kind of dict
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if type(value).__module__ in ("numpy", "torch"):
        if getattr(value, "ndim", None) == 0:
            return value.item()
        if type(value).__name__ == "dtype":
            return str(value).removeprefix("torch.")
    return value


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of sections within sections; the value of a setting stays whole."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not _takes_whole(name):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _takes_whole(name: str) -> bool:
    """Whether a dict is the value of this name, rather than settings below it."""
    known = known_settings()
    takes_dict = [
        each
        for each, setting in known.items()
        if each.endswith(f".{name}") and any(isinstance(kind, kinds.DictType) for kind in members_of(setting.type))
    ]
    return name in known or name.partition(".")[0] == LAB or bool(takes_dict)


def _setting_of(name: str, value: Any) -> tuple[str, Any]:
    """The dotted name and the value of a setting here."""
    known = known_settings()
    if name in known or name.partition(".")[0] == LAB:
        return name, _word(name, value)
    if name in _WORDS:
        return _WORDS[name][0], _word(name, value)
    if name in _FROM_PEERS:
        return _FROM_PEERS[name], value
    sections = [each for each in known if each.replace(".", "_", 1) == name]
    leaves = [each for each in known if each.rpartition(".")[2] == name]
    found = sections or leaves
    if len(found) > 1:
        raise SettingError(f"{name} is a setting of several sections; write one of {', '.join(map(repr, found))}")
    return (found[0], _word(name, value)) if found else (name, value)


def _word(name: str, value: Any) -> Any:
    words = _WORDS.get(name, ("", {}))[1]
    is_word = isinstance(value, str | bool) and value in words
    return words[value] if is_word else value


def _prompts_per_step(batch: Mapping[str, Any], values: Mapping[str, Any], saved: Recipe) -> int:
    """TRL counts samples: those of a device, times the devices that train, times the parts of a step. Raises `SettingError`."""
    samples = values.get("batch.samples_per_prompt", saved.batch.samples_per_prompt)
    devices = values.get("roles.actor", saved.roles.actor)
    device = batch.get("per_device_train_batch_size", _TRL_BATCH)
    parts = batch.get("gradient_accumulation_steps", 1)
    counts = {"batch.samples_per_prompt": samples, "roles.actor": devices} | dict(
        zip(_BATCH, (device, parts), strict=True)
    )
    for name, number in counts.items():
        if not isinstance(number, int) or number < 1:
            raise SettingError(f"{name}={number} is not allowed; it takes int >= 1")
    total = device * devices * parts
    if total % samples:
        raise SettingError(
            f"per_device_train_batch_size={device} x roles.actor={devices} x gradient_accumulation_steps={parts} = {total} samples"
            f" a step are not whole groups of batch.samples_per_prompt={samples} (num_generations); set batch.prompts_per_step"
        )
    return total // samples
