"""Which model a word names, in a command line or as `model.path` of a new run."""

import fcntl
import json
from pathlib import Path

import pytest
import yaml

from headrace.comm.errors import SettingError
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.config.run_checkpoints import TrainedModel, start_lines
from headrace.relay.checkpoints import CheckpointFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with complete checkpoints of steps 2 and 10, one of step 12 under way, and a chat template of its own."""
    run = tmp_path / "my run"
    run.mkdir()
    folder = CheckpointFolder(run)
    for step in (2, 10, 12):
        path = folder.begin(step)
        (path / "dcp").mkdir()
        (path / "hf").mkdir()
        (path / "hf" / "config.json").write_text("{}")
        if step != 12:
            folder.seal(step)
    (folder.root / "best").write_text("step_2")
    folder.set_latest(10)
    (run / "journal.jsonl").write_text("")
    (run / "config.yaml").write_text(
        yaml.safe_dump({"data": {"chat_template": "tokenizer", "chat_template_kwargs": {"enable_thinking": False}}})
    )
    return run


def resolved(path: object, *words: str):
    return read_recipe(None, [f"model.path={path}", *words])


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("", 10),
        ("checkpoints", 10),
        ("checkpoints/latest", 10),
        ("checkpoints/best", 2),
        ("checkpoints/step_2", 2),
        ("checkpoints/step_10/", 10),
    ],
)
def test_a_run_folder_is_its_newest_complete_checkpoint_and_each_part_of_it_is_what_it_names(
    run: Path, place: str, step: int
):
    assert resolved(f"{run}/{place}").model.path == str(run / f"checkpoints/step_{step}/hf")


def test_a_model_that_a_run_wrote_alone_at_its_end_counts_by_its_summary_or_by_its_name(run: Path):
    alone = run / "checkpoints/step_20/hf"
    alone.mkdir(parents=True)
    (alone / "config.json").write_text("{}")
    assert TrainedModel.find(str(run)).step == 10, "it may be in the writing"
    assert TrainedModel.find(str(alone.parent)) == (str(alone), run, 20)
    (run / "summary.json").write_text(json.dumps({"export": "runs/before it was moved/checkpoints/step_20/hf"}))
    assert TrainedModel.find(str(run)) == (str(alone), run, 20)
    assert resolved(run).model.path == str(alone)


@pytest.mark.parametrize("word", ["checkpoints/step_2", "checkpoints/step_2/hf", "checkpoints/best"])
def test_the_model_of_a_checkpoint_belongs_to_its_run(run: Path, word: str):
    model = TrainedModel.find(str(run / word))
    assert (Path(model.path), model.run_dir, model.step) == (run / "checkpoints/step_2/hf", run, 2)
    assert model.recipe_file == run / "config.yaml"
    assert model.is_local and not model.is_adapter


def test_a_word_without_the_folders_above_it_is_of_the_present_folder(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run.parent)
    assert TrainedModel.find("my run") == ("my run/checkpoints/step_10/hf", Path("my run"), 10)
    monkeypatch.chdir(run)
    assert TrainedModel.find(".") == ("checkpoints/step_10/hf", Path(), 10)
    monkeypatch.chdir(run / "checkpoints/step_2")
    assert TrainedModel.find("hf") == ("hf", run, 2)
    assert TrainedModel.find("../latest") == (str(run / "checkpoints/step_10/hf"), run, 10)


def test_an_adapter_is_one_without_the_weights_of_its_base(run: Path):
    adapter = run / "checkpoints/step_2/adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    model = TrainedModel.find(str(adapter))
    assert model == (str(adapter), run, 2) and model.is_adapter
    assert not TrainedModel.find(str(adapter.parent)).is_adapter


def test_a_model_without_a_run_and_a_name_on_the_hub_have_no_recipe(tmp_path: Path):
    copy = tmp_path / "copy of a checkpoint"
    (copy / "hf").mkdir(parents=True)
    (copy / "hf/config.json").write_text("{}")
    for word, path in ((str(copy), str(copy / "hf")), (str(copy / "hf"), str(copy / "hf")), ("org/name", "org/name")):
        model = TrainedModel.find(word)
        assert (model.path, model.recipe_file, model.step) == (path, None, 0)
    assert not TrainedModel.find("org/name").is_local


def test_a_command_refuses_a_folder_without_a_model(run: Path, tmp_path: Path):
    with pytest.raises(SettingError, match=r"^.* has no model: .*config\.yaml.*hf/config\.json"):
        TrainedModel.find(str(tmp_path))
    with pytest.raises(SettingError, match=r"^the run in .*my run has no complete checkpoint step_12 with a model; it"):
        TrainedModel.find(str(run / "checkpoints/step_12"))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.yaml").write_text("run: {steps: 9}\n")
    with pytest.raises(
        SettingError, match=r"^the run in .*begun has no complete checkpoint with a model yet; a run writes one"
    ):
        TrainedModel.find(str(tmp_path / "begun"))


def test_a_pointer_that_a_run_does_not_have_is_refused(run: Path):
    (run / "checkpoints/best").unlink()
    with pytest.raises(SettingError, match=r"^the run in .*my run has no best checkpoint; checkpoint.best"):
        TrainedModel.find(str(run / "checkpoints/best"))
    (run / "checkpoints/latest").unlink()
    with pytest.raises(SettingError, match=r"^model.path: the run in .*my run has no latest checkpoint$"):
        resolved(run / "checkpoints/latest")


def test_a_model_is_of_its_run_from_within_its_folder_and_by_a_link(run: Path, monkeypatch: pytest.MonkeyPatch):
    link = run.parent / "my model"
    link.symlink_to(run / "checkpoints/step_2/hf")
    assert TrainedModel.find(str(link)) == (str(link), run, 2)
    monkeypatch.chdir(link.resolve())
    model = TrainedModel.find(".")
    assert model == (".", run, 2)
    assert model.beside == run / "checkpoints/step_2"


def test_the_chat_template_of_the_other_run_follows_unless_the_recipe_has_one(run: Path):
    assert resolved(run).data.chat_template == "tokenizer"
    assert resolved(run).data.chat_template_kwargs == {"enable_thinking": False}
    own = resolved(run, "data.chat_template={{ messages }}").data
    assert (own.chat_template, own.chat_template_kwargs) == ("{{ messages }}", None)


def test_the_console_says_which_step_it_is_and_warns_while_the_other_run_is_under_way(run: Path):
    recipe = resolved(run)
    assert start_lines(recipe) == [
        f"model.path: the run begins with step 10 of {run} ({recipe.model.path})",
        f"data.chat_template: as in {run}",
    ]
    with (run / "journal.jsonl").open("rb+") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert "is under way and removes old checkpoints" in start_lines(recipe)[-1]


def test_a_resumed_run_keeps_the_checkpoint_that_it_began_with(run: Path, tmp_path: Path):
    words = [f"run.dir={tmp_path / 'new'}", "run.resume=auto"]
    save_recipe(resolved(run, *words))
    folder = CheckpointFolder(run)
    (folder.begin(30) / "hf").mkdir()
    (folder.path(30) / "hf/config.json").write_text("{}")
    folder.seal(30)
    assert resolved(run, *words).model.path.endswith("step_10/hf")
    assert resolved(run, words[0]).model.path.endswith("step_30/hf")
    assert resolved(run / "checkpoints/step_2", *words).model.path.endswith("step_2/hf")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("checkpoints/step_3", "has no complete checkpoint step_3 with a model; it has step_2, step_10"),
        ("checkpoints/step_12", "has no complete checkpoint step_12 with a model; it has step_2, step_10"),
    ],
)
def test_a_checkpoint_that_is_not_complete_is_refused_with_those_that_are(run: Path, place: str, message: str):
    with pytest.raises(SettingError, match=f"^model.path: .*{message}$"):
        resolved(run / place)


def test_a_run_without_a_checkpoint_is_refused_and_so_is_the_run_itself(run: Path, tmp_path: Path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/journal.jsonl").write_text("")
    with pytest.raises(SettingError, match=r"^model.path: the run in .*begun has no complete checkpoint with a model"):
        resolved(tmp_path / "begun")
    for path in (run, run / "checkpoints/step_2/hf"):
        with pytest.raises(SettingError, match=r"^model.path: .* is of the run in run.dir itself"):
            resolved(path, f"run.dir={run}", "run.resume=restart")


@pytest.mark.parametrize("path", ["", "no/such", "org/name"])
def test_other_paths_stay_as_they_are(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert resolved(path).model.path == path
    (tmp_path / "model").mkdir()
    assert resolved(tmp_path / "model").model.path == str(tmp_path / "model")
    assert TrainedModel.of(path) == (path, None, 0)
