"""Which model a word of a command line names."""

import json
from pathlib import Path

import pytest

from headrace.comm.errors import SettingError
from headrace.launch.config.trained_model import TrainedModel
from headrace.relay.checkpoints import CheckpointFolder


def checkpoint(run: Path, step: int, *, is_whole: bool = True, adapter: bool = False) -> Path:
    """A checkpoint of a run, with empty files in place of its content."""
    folder = run / "checkpoints" / f"step_{step}"
    for name in ("dcp", "hf"):
        (folder / name).mkdir(parents=True)
    (folder / "hf" / "config.json").write_text("{}")
    if adapter:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text("{}")
    if is_whole:
        CheckpointFolder(run).seal(step)
    return folder


@pytest.fixture
def run(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("run: {steps: 9}\n")
    return run_dir


def test_a_run_has_the_model_of_its_newest_whole_checkpoint(run: Path):
    checkpoint(run, 9)
    checkpoint(run, 10)
    checkpoint(run, 11, is_whole=False)
    model = TrainedModel.find(str(run))
    assert model == (str(run / "checkpoints" / "step_10" / "hf"), run, 10)
    assert model.recipe_file == run / "config.yaml"
    assert model.is_local and not model.is_adapter


def test_an_exported_model_counts_although_its_checkpoint_did_not_fit_on_the_disk(run: Path):
    checkpoint(run, 9)
    exported = run / "checkpoints" / "step_12" / "hf"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    assert TrainedModel.find(str(run)).step == 9, "it may be in the writing"
    (run / "summary.json").write_text(json.dumps({"export": str(exported)}))
    assert TrainedModel.find(str(run)) == (str(exported), run, 12)


@pytest.mark.parametrize(
    "word", ["checkpoints/step_4", "checkpoints/step_4/hf", "checkpoints/latest", "checkpoints/best"]
)
def test_a_checkpoint_belongs_to_its_run(run: Path, word: str):
    checkpoint(run, 4)
    checkpoint(run, 6)
    for pointer in ("latest", "best"):
        (run / "checkpoints" / pointer).write_text("step_4")
    model = TrainedModel.find(str(run / word))
    assert (Path(model.path), model.run_dir, model.step) == (run / "checkpoints" / "step_4" / "hf", run, 4)


def test_an_adapter_is_one_without_the_weights_of_its_base(run: Path):
    folder = checkpoint(run, 4, adapter=True)
    model = TrainedModel.find(str(folder / "adapter"))
    assert model.is_adapter
    assert (model.run_dir, model.step) == (run, 4)
    assert not TrainedModel.find(str(folder)).is_adapter


def test_a_model_without_a_run_and_a_name_on_the_hub_have_no_recipe(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for word in (str(tmp_path), "org/model"):
        model = TrainedModel.find(word)
        assert (model.path, model.recipe_file, model.step) == (word, None, 0)
    assert not TrainedModel.find("org/model").is_local


def test_a_folder_without_a_model_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(SettingError, match="has no checkpoint yet"):
        TrainedModel.find(str(run))
    with pytest.raises(SettingError, match=r"has no model: .*config\.yaml.*hf/config\.json"):
        TrainedModel.find(str(tmp_path))
    unfinished = checkpoint(run, 5, is_whole=False)
    with pytest.raises(SettingError, match=r"step_5 is not complete: it has no manifest\.json"):
        TrainedModel.find(str(unfinished))
