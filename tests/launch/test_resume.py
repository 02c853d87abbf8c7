"""A run that is resumed continues after its last trained step, says how, and loses nothing in silence."""

from pathlib import Path

import numpy as np
import pytest
from support.emulated_run import EMULATED

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.resume import choose_point, prepare_folder
from headrace.launch.run import main
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.journal.events import Checkpointed, Opened, Trained
from headrace.relay.journal.journal import Journal
from headrace.relay.weights.copies_on_disk import CopiesOnDisk, CopyHead
from headrace.trainer.step_log import StepLog


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Six steps; the checkpoints of steps 2, 4 and 6 are whole, and the journal has the first two."""
    folder, journal = CheckpointFolder(tmp_path), Journal(tmp_path / "journal.jsonl")
    journal.append(Opened(epoch=1, samples_per_prompt=2))
    for step in range(6):
        journal.append(Trained(step=step))
        if step in (1, 3, 5):
            data = folder.begin(step + 1) / "dcp"
            data.mkdir()
            (data / "data").write_bytes(bytes(100))
            folder.seal(step + 1)
        if step in (2, 4):  # written while the next step was trained
            journal.append(Checkpointed(step=step, path=str(folder.path(step))))
    journal.close()
    folder.set_latest(4)
    return tmp_path


def recipe_of(run_dir: Path, *words: str) -> Recipe:
    return read_recipe(None, [f"run.dir={run_dir}", "run.resume=auto", *words])


def save_rows(run_dir: Path, *steps: int, num_ranks: int = 1) -> None:
    for step in steps:
        for rank in range(num_ranks):
            StepLog(run_dir, rank, num_ranks).write(step)


def test_a_run_continues_after_its_last_step_from_the_newest_checkpoint_and_the_rows_after_it(run_dir: Path):
    save_rows(run_dir, 4, 5)
    step, checkpoint, lines, _ = choose_point(recipe_of(run_dir))
    assert (step, checkpoint) == (6, 4)
    assert "step_6 is not in the journal" in lines[0] and "continues after step 6, from" in lines[1]
    assert "step_4; steps 5 to 6 are trained again from rows/" in lines[1] and len(lines) == 2


def test_metrics_and_samples_of_steps_that_are_given_up_are_kept_under_other_names(run_dir: Path):
    save_rows(run_dir, 4)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(6)))
    (run_dir / "samples.jsonl").write_text("".join(f'{{"step":{step},"sample":0}}\n' for step in range(1, 7)))
    prepare_folder(recipe_of(run_dir))
    assert (run_dir / "metrics.jsonl.discarded-1").read_text() == '{"step": 5}\n'
    assert (run_dir / "samples.jsonl.discarded-1").read_text() == '{"step":6,"sample":0}\n'


def test_steps_whose_rows_are_missing_or_of_another_number_of_ranks_are_given_up_for_a_checkpoint(run_dir: Path):
    save_rows(run_dir, 4)
    step, checkpoint, lines, _ = choose_point(recipe_of(run_dir))
    assert (step, checkpoint) == (5, 4)
    assert "step 6 is given up, since rows/step_5.safetensors is missing" in lines[-1]
    save_rows(run_dir, 4, 5, num_ranks=2)
    step, checkpoint, lines, _ = choose_point(recipe_of(run_dir))
    assert (step, checkpoint) == (4, 4)
    assert "steps 5 to 6 are given up, since roles.actor=1: step 5 was trained by 2 actor ranks" in lines[-1]
    assert choose_point(recipe_of(run_dir, "trainer.engine=mine.py:Mine")).step == 4


def test_checkpoints_and_saved_queues_of_steps_that_are_given_up_get_other_names(run_dir: Path):
    queue = CheckpointFolder(run_dir, "queue")
    for step in (4, 6):
        (queue.begin(step) / "rows-1.safetensors").touch()
    prepare_folder(recipe_of(run_dir))
    folder = CheckpointFolder(run_dir)
    assert (folder.latest(), list(folder.whole())) == (4, [2, 4]), "a trainer that starts again takes a whole one"
    assert (run_dir / "checkpoints.discarded-1/step_6/dcp/data").exists()
    assert not queue.path(6).exists() and (run_dir / "queue.discarded-1/step_6/rows-1.safetensors").exists()
    assert queue.path(4).exists()


def leave_copies(run_dir: Path, *steps: int, num_ranks: int = 1) -> CopiesOnDisk:
    saved = CopiesOnDisk(run_dir)
    for step in steps:
        saved.write(0, CopyHead(step, f"{step:032x}", 11, 100, num_ranks, "1"), np.zeros(100, np.uint8))
    return saved


def test_a_copy_of_the_state_that_is_newer_than_the_checkpoint_saves_steps_and_the_others_are_removed(run_dir: Path):
    save_rows(run_dir, 4, 5)
    saved = leave_copies(run_dir, 3, 5, 7)  # the journal has no step 7
    point = choose_point(recipe_of(run_dir))
    assert point[:2] == (6, 4) and point.copy == 5
    again = f"continues after step 6, from the copy of the training state in {saved.path(5)}; step 6 is trained again"
    assert again in point.lines[-1]
    assert prepare_folder(recipe_of(run_dir)) == point.lines
    assert saved.steps() == [5] and CheckpointFolder(run_dir).latest() == 4, "the trainer falls back to the checkpoint"
    assert (run_dir / "rows/step_4.safetensors").exists() and not (run_dir / "memory.discarded-1").exists()


def test_a_copy_does_not_decide_where_a_run_continues(run_dir: Path):
    save_rows(run_dir, 5)
    saved = leave_copies(run_dir, 5)
    point = choose_point(recipe_of(run_dir))
    assert point[:2] == (4, 4) and point.copy is None, "the rows of step 5 are missing"
    prepare_folder(recipe_of(run_dir))
    assert not saved.steps() and (run_dir / "memory.discarded-1/step_5/actor-0.state").exists()


def test_an_incomplete_copy_is_skipped_and_an_older_one_stays(run_dir: Path):
    save_rows(run_dir, 4, 5)
    saved = leave_copies(run_dir, 5, 6)
    saved.file(6, 0).write_bytes(saved.file(6, 0).read_bytes()[:-1])
    point = choose_point(recipe_of(run_dir))
    assert point.copy == 5
    assert "run.resume=auto: memory/step_6 lacks a whole actor-0.state; it is skipped" in point.lines
    prepare_folder(recipe_of(run_dir))
    assert 5 in saved.steps()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run_dir: Path):
    (run_dir / "checkpoints/step_4/dcp/data").write_bytes(bytes(99) + b"\1")
    step, checkpoint, lines, _ = choose_point(recipe_of(run_dir))
    assert (step, checkpoint) == (2, 2)
    assert any("step_4 has a damaged dcp/data" in line for line in lines)


def test_a_dangling_or_empty_pointer_does_not_hide_whole_checkpoints(run_dir: Path):
    for content in ("step_99", ""):
        (run_dir / "checkpoints/latest").write_text(content)
        assert choose_point(recipe_of(run_dir)).checkpoint == 4


def without_checkpoints(run_dir: Path) -> None:
    (run_dir / "checkpoints/step_2/manifest.json").unlink()
    (run_dir / "checkpoints/step_4/dcp/data").unlink()


def test_without_a_checkpoint_all_steps_are_trained_again_from_their_rows(run_dir: Path):
    without_checkpoints(run_dir)
    save_rows(run_dir, *range(6))
    step, checkpoint, lines, _ = choose_point(recipe_of(run_dir))
    assert (step, checkpoint) == (6, None)
    assert "continues after step 6; it has no checkpoint that can be used; steps 1 to 6 are trained again" in lines[-1]
    assert prepare_folder(recipe_of(run_dir)) == lines
    assert CheckpointFolder(run_dir).latest() is None, "the trainer does not load it"


def test_without_a_checkpoint_and_with_too_few_rows_a_run_is_not_resumed_and_says_what_there_is_to_do(run_dir: Path):
    without_checkpoints(run_dir)
    save_rows(run_dir, 0, 1, 2, 4, 5)
    files = sorted(run_dir.rglob("*"))
    with pytest.raises(SettingError) as refused:
        prepare_folder(recipe_of(run_dir))
    for part in (
        "step_6 is not in", "step_4 lacks dcp/data", "step_2 is incomplete", "rows/step_3.safetensors is missing",
        "run.resume=restart", "another run.dir",
    ):  # fmt: skip
        assert part in str(refused.value)
    assert sorted(run_dir.rglob("*")) == files
    (run_dir / "journal.jsonl").unlink()
    with pytest.raises(SettingError, match=r"run\.resume.*step_4 is not in the journal"):
        prepare_folder(recipe_of(run_dir))


def test_steps_are_not_trained_again_from_another_policy_and_other_settings_are_a_warning(run_dir: Path):
    save_rows(run_dir, *range(6))
    save_recipe(recipe_of(run_dir, "model.path=first", "optimizer.lr=1e-5"))
    other = recipe_of(run_dir, "model.path=second", "optimizer.lr=1e-6")
    _, checkpoint, lines, _ = choose_point(other)
    assert checkpoint == 4
    assert "warning: steps are trained again with other settings than in the previous run: optimizer.lr" in lines[-1]
    without_checkpoints(run_dir)
    with pytest.raises(SettingError, match=r"model\.path had another value in the previous run"):
        choose_point(other)


def test_a_run_that_continues_from_its_last_step_says_which_settings_are_others(run_dir: Path):
    save_recipe(recipe_of(run_dir, "optimizer.lr=1e-5", "model.dtype=float32"))
    other = recipe_of(run_dir, "optimizer.lr=1e-6", "model.dtype=bfloat16", "trainer.engine=mine.py:Mine")
    setting, dtype = choose_point(other).lines[-2:]
    assert setting == "warning: the run continues with other settings than in the previous run: optimizer.lr"
    assert dtype.startswith(f"warning: model.dtype=bfloat16: the steps in {run_dir} were trained with float32; ")
    same = recipe_of(run_dir, "optimizer.lr=1e-5", "model.dtype=float32")
    assert not any("warning" in line for line in choose_point(same).lines)


def test_a_run_that_died_before_its_first_step_just_starts(tmp_path: Path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(Opened(epoch=1, samples_per_prompt=2))
    journal.close()
    (tmp_path / "metrics.jsonl").touch()
    (line,) = prepare_folder(recipe_of(tmp_path))
    assert "has no trained step; the run starts at step 1" in line
    assert not (tmp_path / "journal.jsonl").exists() and (tmp_path / "journal.jsonl.discarded-1").exists()


def test_steps_that_no_journal_knows_are_not_overwritten(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(SettingError, match=r"metrics\.jsonl has steps that are not in journal\.jsonl"):
        prepare_folder(recipe_of(tmp_path))


def test_a_run_that_starts_again_keeps_the_files_of_the_one_before_under_other_names(run_dir: Path):
    save_rows(run_dir, 0)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    for number in (1, 2):
        before = {path.name: path.stat().st_ino for path in run_dir.iterdir() if "discarded" not in path.name}
        (line,) = prepare_folder(recipe_of(run_dir, "run.resume=restart"))
        assert "starts at step 1" in line and f"metrics.jsonl.discarded-{number}" in line
        after = {path.name: path.stat().st_ino for path in run_dir.glob(f"*.discarded-{number}")}
        assert after == {f"{name}.discarded-{number}": inode for name, inode in before.items()}
        (run_dir / "metrics.jsonl").touch()


def test_files_in_the_way_of_a_first_run_are_kept_under_names_that_are_told(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (line,) = prepare_folder(recipe_of(tmp_path, "run.resume=never"))
    assert "now checkpoints.discarded-1" in line and (tmp_path / "checkpoints.discarded-1").is_dir()


def test_a_dry_run_says_how_a_run_would_continue_and_refuses_what_a_start_refuses(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    (data := run_dir / "data.jsonl").write_text('{"prompt": "p"}\n')
    words = [f"{name}={value}" for name, value in EMULATED.items()]
    words += [f"run.dir={run_dir}", f"data.path={data}", "run.resume=auto", "run.steps=9", "--dry-run"]
    before = sorted(run_dir.rglob("*"))
    assert main(words) == 0
    assert "run.resume=auto: the run continues after step 4, from" in capsys.readouterr().out
    without_checkpoints(run_dir)
    kept = sorted(run_dir.rglob("*"))
    assert main(words) == 2
    assert "error: run.resume: the 6 steps of the run" in capsys.readouterr().err
    assert sorted(run_dir.rglob("*")) == kept and set(kept) < set(before)


def test_fewer_steps_than_a_run_has_trained_are_a_mistake_in_the_settings(run_dir: Path):
    with pytest.raises(SettingError, match=r"run\.steps=5: the run in .* has trained 6 steps; raise run\.steps"):
        choose_point(recipe_of(run_dir, "run.steps=5"))
