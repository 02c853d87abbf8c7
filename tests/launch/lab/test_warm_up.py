"""The warm-up run of a plan: a real run, which is made once."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.lab.warm_up import WARM_UP, run_to_end, warm_up


def finished(folder: Path) -> str:
    """A recipe whose warm-up is finished in the folder."""
    path = folder / "recipe.yaml"
    path.write_text("run: {seed: 7}\n")
    words = [f"{key}={value}" for key, value in WARM_UP.items()]
    save_recipe(read_recipe(path, [*words, f"run.dir={folder / 'warm-up'}"]))
    (folder / "warm-up" / "summary.json").write_text(json.dumps({"status": "finished"}))
    return str(path)


def test_a_finished_run_of_the_same_recipe_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    warm_up(finished(tmp_path), [], tmp_path / "warm-up")
    assert capsys.readouterr().err == ""


def test_a_finished_run_of_another_recipe_is_refused(tmp_path: Path):
    with pytest.raises(SettingError, match="warm-up holds a run of another recipe"):
        warm_up(finished(tmp_path), ["run.seed=8"], tmp_path / "warm-up")


def test_a_run_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = finished(tmp_path)
    (tmp_path / "warm-up" / "summary.json").unlink()
    monkeypatch.setattr("headrace.launch.lab.warm_up.check_recipe", lambda recipe: None)
    monkeypatch.setattr("headrace.launch.lab.warm_up.run_to_end", lambda command: 3)
    with pytest.raises(SettingError, match="warm-up ended with 3; see its logs"):
        warm_up(recipe, [], tmp_path / "warm-up")


def test_a_command_is_run_to_its_end():
    assert run_to_end([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_an_interrupt_ends_the_command_in_order_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: float) -> None:
        if (tmp_path / "begun").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("headrace.launch.lab.warm_up.time", SimpleNamespace(sleep=interrupt))
    code = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / 'ended').touch()))\n"
        "(folder / 'begun').touch()\n"
        "while True: time.sleep(0.01)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        run_to_end([sys.executable, "-c", code])
    assert (tmp_path / "ended").exists()
