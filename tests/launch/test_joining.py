"""A host joins a running job only with the files that the job's recipe names."""

from pathlib import Path

import pytest
from support.policies import tiny_policy

from headrace.comm.errors import SettingError
from headrace.comm.recipe import RoleSettings
from headrace.launch.config.load import read_recipe
from headrace.launch.processes.joining import check_joining

ROLLOUT = RoleSettings(rollout=1)


def test_a_host_joins_from_the_folder_in_which_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = tmp_path / "a b"
    elsewhere = tmp_path / "elsewhere"
    (here / "runs" / "j").mkdir(parents=True)
    elsewhere.mkdir()
    tiny_policy(here, "llama")
    (here / "r.py").write_text("def reward(completions):\n    return [1.0] * len(completions)\n")
    recipe = read_recipe(None, ["run.dir=runs/j", "model.path=llama", "reward.path=r.py:reward"])
    monkeypatch.chdir(here)
    check_joining(recipe, "runs/j", ROLLOUT)
    check_joining(recipe, str(here / "runs" / "j"), ROLLOUT)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(
        SettingError, match=r"^join: .* run\.dir=runs/j; join it from that folder, not from .*elsewhere$"
    ):
        check_joining(recipe, "../a b/runs/j", ROLLOUT)
    assert not [*elsewhere.iterdir()]


def test_a_file_that_is_not_on_the_host_is_an_error_before_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(None, ["model.path=runs/policy", "reward.path=r.py:reward"])
    with pytest.raises(SettingError, match=r"^model\.path: runs/policy does not exist"):
        check_joining(recipe, "10.0.0.1:29500", ROLLOUT)
