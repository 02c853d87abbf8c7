"""Settings of the algorithm that exclude each other are refused, and those without effect are warnings."""

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.algorithm_checks import check_algorithm
from headrace.launch.config.load import read_recipe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.kl_in=reward"], "algorithm.kl_in=reward: .* algorithm.kl_coef"),
        (["algorithm.overlong_buffer=9", "sampling.max_new_tokens=8"], "algorithm.overlong_buffer=9"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(words: list[str], message: str):
    with pytest.raises(SettingError, match=message):
        check_algorithm(read_recipe(None, words))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["batch.samples_per_prompt=1"], "batch.samples_per_prompt=1"),
        (["algorithm.loss=cispo", "algorithm.clip_dual=3"], "algorithm.clip_dual"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "algorithm.kl_estimator=k1"),
        (["algorithm.lam=0.95"], "algorithm.lam"),
        (["critic.warmup_steps=1"], "critic.warmup_steps"),
        (["critic.lr=1e-6"], "critic.lr, critic.clip_value"),
        (["algorithm.advantage=gae", "critic.warmup_steps=3", "run.steps=3"], "critic.warmup_steps=3"),
    ],
)
def test_a_setting_without_effect_is_a_warning(words: list[str], name: str):
    (warning,) = check_algorithm(read_recipe(None, words))
    assert name in warning


def test_the_defaults_give_no_warning():
    assert check_algorithm(read_recipe(None)) == []
