"""The settings that trackers get have no passwords."""

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


def test_only_changed_settings_tell_runs_apart():
    assert {*changed_settings(RECIPE)} == {"run.steps", "reward.path", "data.chat_template_kwargs"}
    assert changed_settings(replace(Recipe(), lab={"seed": 3})) == {"lab.seed": 3}
