"""A tracker without its package is refused before the start."""

import importlib
from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import RunSettings
from headrace.launch.config.checks.trackers import check_trackers
from headrace.launch.config.load import read_recipe


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", "mlflow-skinny")])
def test_a_missing_package_is_refused_with_the_setting_and_the_command(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / name).mkdir()  # as the package itself makes it for its files
    settings = read_recipe(None, [f"run.report_to=[tensorboard,{name}]"]).run
    with pytest.raises(SettingError, match=rf"^run\.report_to={name}: .* pip install {package}, or leave {name} out"):
        check_trackers(settings)
    (tmp_path / name / "__init__.py").touch()
    importlib.invalidate_caches()
    check_trackers(RunSettings(report_to=(name,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "names"), [("tensorboard", ("tensorboard",)), ("[]", ()), ("[wandb, mlflow]", ("wandb", "mlflow"))]
)
def test_one_tracker_needs_no_list(word: str, names: tuple[str, ...]):
    assert read_recipe(None, [f"run.report_to={word}"]).run.report_to == names


def test_an_unknown_tracker_is_refused_with_the_setting():
    with pytest.raises(SettingError, match=r"run\.report_to"):
        read_recipe(None, ["run.report_to=[wandbb]"])
