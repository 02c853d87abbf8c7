"""The settings that trackers get have no passwords."""

import pytest
from msgspec.structs import replace

from headrace.comm.recipe import DataSettings, Recipe, RewardSettings, RunSettings
from headrace.trainer.record.trackers.settings import changed_settings, shown_settings

RECIPE = Recipe(
    run=RunSettings(dir="runs/mine", steps=7, resume="auto"),
    reward=RewardSettings(
        path=("https://me:hidden@host/score?api_key=hidden&b=2", "judge+http://host/v1#model=m", "a.py:b")
    ),
    data=DataSettings(chat_template_kwargs={"enable_thinking": False, "api_key": "hidden"}),
)


def test_settings_have_their_whole_names_and_no_passwords():
    shown = shown_settings(RECIPE)
    assert shown["run.steps"] == 7 and shown["optimizer.lr"] == RECIPE.optimizer.lr
    assert shown["reward.path"] == ["https://***@host/score?api_key=***&b=2", "judge+http://host/v1#model=m", "a.py:b"]
    assert shown["data.chat_template_kwargs"] == {"enable_thinking": False, "api_key": "***"}
    assert "hidden" not in str(shown)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("https://me:hid@den@host/score", "https://***@host/score"),
        ("https://host/a?sig=hidden&n=2&X-Amz-Signature=hidden", "https://host/a?sig=***&n=2&X-Amz-Signature=***"),
        ("https://host/a?auth=hidden;access_token=hidden", "https://host/a?auth=***;access_token=***"),
        ("https://host/a?to=me@home", "https://host/a?to=me@home"),
    ],
)
def test_addresses_have_no_passwords_and_no_signatures(path: str, shown: str):
    assert shown_settings(Recipe(reward=RewardSettings(path=(path,))))["reward.path"] == [shown]


def test_lists_of_keys_are_hidden_too():
    shown = shown_settings(Recipe(lab={"api_keys": ["hidden"], "headers": {"Authorization": "Bearer hidden"}}))
    assert (shown["lab.api_keys"], shown["lab.headers"]) == ("***", {"Authorization": "***"})


def test_only_changed_settings_tell_runs_apart():
    assert {*changed_settings(RECIPE)} == {"run.steps", "reward.path", "data.chat_template_kwargs"}
    assert changed_settings(replace(Recipe(), lab={"seed": 3})) == {"lab.seed": 3}
