"""Settings of the algorithm that exclude each other are refused, and those without effect are warnings."""

import pytest
from support.algorithm_steps import ALGORITHMS

from headrace.comm.errors import SettingError
from headrace.launch.config.checks.algorithm import check_algorithm
from headrace.launch.config.load import read_recipe

ROLLOUT = "algorithm.proximal=rollout"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.kl_in=reward"], "algorithm.kl_in=reward has no effect .* algorithm.kl_coef"),
        (["algorithm.overlong_buffer=9", "sampling.max_new_tokens=8"], "algorithm.overlong_buffer=9"),
        (["queue.filter_zero_std=true", "batch.samples_per_prompt=1"], "queue.filter_zero_std=true: .* batch.samples_per_prompt=1"),
    ],
)  # fmt: skip
def test_settings_that_exclude_each_other_are_refused(words: list[str], message: str):
    with pytest.raises(SettingError, match=message):
        check_algorithm(read_recipe(None, words))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["batch.samples_per_prompt=1"], "batch.samples_per_prompt=1"),
        (["algorithm.loss=cispo", "algorithm.clip_dual=3", ROLLOUT], "algorithm.clip_dual"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "algorithm.kl_estimator=k1"),
        (["algorithm.lam=0.95"], "algorithm.lam"),
        (["critic.warmup_steps=1"], "critic.warmup_steps"),
        (["critic.lr=1e-6"], "critic.lr, critic.clip_value"),
        (["algorithm.advantage=gae", "critic.warmup_steps=3", "run.steps=3"], "critic.warmup_steps=3"),
        (["algorithm.importance_sampling=sequence_mask", "algorithm.importance_sampling_cap=1.01", ROLLOUT], "sampling, algorithm.importance_sampling_cap: no"),
        (["algorithm.importance_sampling_cap=1.01", ROLLOUT], "algorithm.importance_sampling_cap: no effect"),
        (["algorithm.advantage=rloo", "algorithm.scale_rewards=batch"], "algorithm.scale_rewards has no effect"),
        (["algorithm.overlong_penalty=2"], "algorithm.overlong_penalty has no effect with algorithm.overlong_buffer=0"),
        (["algorithm.kl_estimator=k2"], "algorithm.kl_estimator has no effect with algorithm.kl_coef=0"),
        (["algorithm.loss=reinforce", "algorithm.clip_high=.3"], "algorithm.clip_high: no effect on algorithm.loss=reinforce"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_a_warning(words: list[str], name: str):
    (warning,) = check_algorithm(read_recipe(None, words))
    assert name in warning


def test_the_defaults_give_no_warning():
    assert check_algorithm(read_recipe(None)) == []


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["algorithm.clip_low=.01"], "algorithm.clip_low"),
        (["algorithm.clip_high=.28", "algorithm.clip_dual=3"], "algorithm.clip_high, algorithm.clip_dual"),
        (["algorithm.loss=cispo"], "algorithm.loss=cispo"),
        (["algorithm.loss=gspo", "algorithm.clip_low=3e-4"], "algorithm.loss=gspo, algorithm.clip_low"),
    ],
)
def test_a_loss_or_clip_whose_ratio_is_always_1_is_a_warning_that_names_what_to_set(words: list[str], names: str):
    (warning,) = check_algorithm(read_recipe(None, words))
    assert warning.startswith(f"{names}: no effect") and "set algorithm.proximal=rollout" in warning
    for cure in (ROLLOUT, "batch.updates_per_version=2", "batch.passes=2"):
        told = check_algorithm(read_recipe(None, [*words, cure]))
        assert not [warning for warning in told if "ratio" in warning]


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.importance_sampling=token_truncate"],
        ["algorithm.loss=gspo", "algorithm.importance_sampling=sequence_truncate"],
        ["algorithm.loss=reinforce"],
        ["algorithm.loss=losses.py:mine", "algorithm.clip_high=.3"],
    ],
)
def test_a_loss_and_bounds_that_act_without_a_ratio_give_no_warning(words: list[str]):
    assert check_algorithm(read_recipe(None, words)) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_settings_of_the_documented_algorithms_all_have_an_effect(name: str):
    words = [f"{key}={value}" for key, value in ALGORITHMS[name].items() if key != "algorithm.clip_dual"]
    assert check_algorithm(read_recipe(None, ["sampling.max_new_tokens=20480", *words])) == []
