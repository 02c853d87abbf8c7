"""Settings as a Python caller writes them: by their names here, and by those of TRL and verl where these mean the same."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.errors import SettingError
from headrace.launch.config.load import known_settings, recipe_of
from headrace.launch.config.peer_names import PEERS
from headrace.launch.python import keywords
from headrace.launch.python.keywords import dotted_settings, nested, plain


def told_of(**settings: Any) -> str:
    with pytest.raises(SettingError) as told:
        recipe_of(nested(dotted_settings(settings)))
    return str(told.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.lr": 3e-6},
        {"optimizer": {"lr": 3e-6}},
        {"optimizer_lr": 3e-6},
        {"learning_rate": 3e-6},
        {"actor_rollout_ref.actor.optim.lr": 3e-6},
        {"actor_rollout_ref": {"actor": {"optim": {"lr": np.float64(3e-6)}}}},
    ],
    ids=["dotted", "section", "joined", "TRL", "verl", "verl's sections"],
)
def test_one_setting_has_several_spellings(settings: dict[str, Any]):
    assert dotted_settings(settings) == {"optimizer.lr": 3e-6}
    assert recipe_of(nested(dotted_settings(settings))).optimizer.lr == 3e-6


def test_the_last_part_of_a_name_is_enough_where_one_section_has_it():
    assert dotted_settings({"max_new_tokens": 5, "seed": 2}) == {"sampling.max_new_tokens": 5, "run.seed": 2}
    assert told_of(lr=1) == "lr is a setting of several sections; write one of 'optimizer.lr', 'critic.lr'"


@pytest.mark.parametrize("name", keywords._FROM_PEERS)
def test_the_name_of_a_peer_is_that_of_a_setting_here(name: str):
    """It leads where the message about an unknown setting leads, if that knows it."""
    setting = keywords._FROM_PEERS[name]
    assert setting in known_settings()
    hints = {peer[tail] for peer in PEERS.values() for tail in tails(name) if tail in peer}
    assert hints <= {setting}


def tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"epsilon": 0.1}, {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3}),
        ({"loss_type": "dr_grpo"}, {"algorithm.loss_agg": "seq-mean-token-sum-norm"}),
        ({"scale_rewards": False}, {"algorithm.scale_rewards": "none"}),
        ({"scale_rewards": "batch"}, {"algorithm.scale_rewards": "batch"}),
        ({"per_device_train_batch_size": 32}, {"batch.prompts_per_step": 4}),
        ({"gradient_accumulation_steps": 3, "roles.actor": 2}, {"roles.actor": 2, "batch.prompts_per_step": 6}),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4},
            {"batch.samples_per_prompt": 4, "batch.prompts_per_step": 2},
        ),
    ],
)  # fmt: skip
def test_a_setting_of_trl_with_other_units_or_words_is_translated(settings: dict[str, Any], meant: dict[str, Any]):
    assert dotted_settings(settings) == meant
    recipe_of(nested(meant))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_iterations": 2}, "unknown setting 'num_iterations'; TRL's num_iterations is batch.passes"),
        ({"num_train_epochs": 2}, "unknown setting 'num_train_epochs'; TRL's num_train_epochs is run.steps"),
        ({"bf16": True}, "unknown setting 'bf16'; TRL's bf16 is model.dtype"),
        ({"trainer.lr": 1}, "unknown setting 'trainer.lr'; the nearest is 'optimizer.lr'"),
        ({"critic.optim.lr": 1}, "unknown setting 'critic.optim.lr'; verl's critic.optim.lr is critic.lr"),
        ({"trainer": {"total_epochs": 1}}, "unknown setting 'trainer.total_epochs'; verl's total_epochs is run.steps"),
        ({"max_step": 3}, "unknown setting 'max_step'; --help lists all settings"),
        ({"loss_type": "sapo"}, "algorithm.loss_agg=sapo is not allowed; it takes one of seq-mean-token-mean"),
        ({"learning_rate": "much"}, "optimizer.lr=much is not allowed; it takes finite float >= 0"),
        ({"max_steps": -1}, "run.steps=-1 is not allowed; it takes int >= 1"),
        ({"max_steps": 3, "run": {"steps": 4}}, "run.steps is given twice, as max_steps and as run.steps"),
        ({"optimizer": "adamw"}, "'optimizer' is a section; set one of its settings, such as optimizer.name"),
        ({"optimizer": "adamw", "optimizer.lr": 1}, "optimizer.lr: optimizer is given as a section and as one value, 'adamw'"),
        ({"optimizer.lr": 1, "optimizer": "adamw"}, "optimizer is given as a section and as one value, 'adamw'"),
        ({"sampling.top_p": {"a": 1}}, "sampling.top_p is one value and has no settings of its own"),
        ({"per_device_train_batch_size": 3}, "= 3 samples a step are not whole groups of batch.samples_per_prompt=8"),
        ({"per_device_train_batch_size": 8, "num_generations": "x"}, "batch.samples_per_prompt=x is not allowed; it takes int >= 1"),
        ({"epsilon": 0.2, "actor_rollout_ref": {"actor": {"clip_ratio": 0.3}}}, "is given twice, as epsilon and as actor_rollout_ref.actor.clip_ratio"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is not allowed; it takes int >= 1"),
        ({"per_device_train_batch_size": 8, "batch.prompts_per_step": 1}, "batch.prompts_per_step is given twice"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line_that_names_the_setting(settings: dict[str, Any], told: str):
    text = told_of(**settings)
    assert told in text and "\n" not in text


class Schedule(StrEnum):
    """As `SchedulerType` of transformers."""

    COSINE = "cosine"


def test_values_of_numpy_and_paths_become_plain_ones():
    given = {"a": [np.int64(3), Path("x/y")], "b": (np.bool_(True),), "c": {"d": np.float32(0.5)}, "e": "text"}
    found = plain(given)
    assert found == {"a": [3, "x/y"], "b": [True], "c": {"d": 0.5}, "e": "text"}
    assert plain([torch.bfloat16, torch.tensor(0.5), Schedule.COSINE]) == ["bfloat16", 0.5, "cosine"]
    assert type(plain(Schedule.COSINE)) is str
    assert type(dotted_settings({"epsilon": np.float32(0.5)})["algorithm.clip_low"]) is float
    assert [type(each) for each in (*found["a"], *found["b"])] == [int, str, bool]


def test_the_batch_of_a_run_that_continues_counts_in_its_own_groups_and_devices():
    saved = recipe_of({"batch": {"samples_per_prompt": 2}, "roles": {"actor": 3}})
    found = dotted_settings({"gradient_accumulation_steps": 2}, saved=saved)
    assert found == {"batch.prompts_per_step": 8 * 2 * 3 // 2}
    found = dotted_settings({"gradient_accumulation_steps": 2, "num_generations": 4}, saved=saved)
    assert found["batch.prompts_per_step"] == 8 * 2 * 3 // 4


def test_arguments_of_a_chat_template_stay_one_value():
    assert dotted_settings({"chat_template_kwargs": {"enable_thinking": False}}) == {
        "data.chat_template_kwargs": {"enable_thinking": False}
    }
