"""A new run begins with the weights of another run when `model.path` names it."""

import fcntl
from pathlib import Path

import pytest
import yaml

from headrace.comm.errors import SettingError
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.config.run_checkpoints import RunCheckpoint, start_lines
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


def test_a_policy_that_a_run_wrote_alone_at_its_end_counts(run: Path):
    (run / "checkpoints/step_20/hf").mkdir(parents=True)
    (run / "checkpoints/step_20/hf/config.json").write_text("{}")
    assert resolved(run).model.path == str(run / "checkpoints/step_20/hf")


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
    assert RunCheckpoint.of(path) is None
