"""Mistakes in the reward settings are found before a process starts."""

from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.checks.recipe import check_function, check_rewards
from headrace.launch.config.load import read_recipe


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text("def score(answer): ...\ndef mean(answer): ...\n")
    (tmp_path / "other.py").write_text("def score(answer): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.path="], r"reward\.path is not set"),
        (["reward.path=[]"], r"reward\.path is not set"),
        (["reward.path=gsm9k"], r"reward\.path: 'gsm9k' is not of the form FILE"),
        (["reward.path=[gsm8k, a/rewards.py:scor]"], r"a/rewards\.py has no function 'scor'"),
        (["reward.path=[gsm8k, length]", "reward.weights=[1]"], r"reward\.weights: 1 weights for 2 functions"),
        (["reward.path=[a/rewards.py:score, b/rewards.py:score]"], r"the name 'rewards\.score' is already taken"),
        (["reward.path=[gsm8k, gsm8k]"], r"the name '.*gsm8k' is already taken"),
        (["reward.path=a/rewards.py:mean"], r"the name 'mean' is already taken"),
    ],
)
def test_a_mistake_names_its_setting(words: list[str], message: str):
    with pytest.raises(SettingError, match=message):
        check_rewards(read_recipe(None, words).reward)


@pytest.mark.usefixtures("files")
def test_functions_of_one_name_are_told_apart_by_their_files():
    recipe = read_recipe(
        None, ["reward.path=[other.py:score, gsm8k, a/rewards.py:score]", "reward.weights=[1, 0.5, -2]"]
    )
    check_rewards(recipe.reward)
    assert list(recipe.reward.functions) == ["other.score", "gsm8k", "rewards.score"]
    assert recipe.reward.weights == (1, 0.5, -2)


def test_a_ready_function_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.launch.config.checks.recipe.find_spec", lambda name: None)
    with pytest.raises(
        SettingError, match=r"reward\.path: math needs the package math_verify: pip install math-verify"
    ):
        check_rewards(read_recipe(None, ["reward.path=[gsm8k, math]"]).reward)


@pytest.mark.parametrize(
    "text", ["score: object = print", "other, score = len, print", "with open(__file__):\n    score = print"]
)
def test_a_file_may_bind_its_function_in_any_way(tmp_path: Path, text: str):
    (tmp_path / "rewards.py").write_text(text)
    check_function("reward.path", f"{tmp_path}/rewards.py:score")
