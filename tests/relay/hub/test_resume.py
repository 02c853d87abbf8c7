"""A resumed run's journal replaces the one before in a single step, whenever the power is cut."""

from pathlib import Path

import pytest
from support.power_cut import PowerCuts

from headrace.comm.clock import Clock
from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId
from headrace.comm.recipe import BatchSettings, DataSettings, Recipe, RunSettings
from headrace.launch.resume import choose_checkpoint
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.hub.loop import open_journal
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal, JournalError, read_events
from headrace.relay.journal.state import HubState


def interrupted_run(run_dir: Path) -> Path:
    """A run of four steps whose checkpoint after the second one was written during the third."""
    run_dir.mkdir()
    journal = Journal(run_dir / "journal.jsonl")
    journal.append(ev.Opened(epoch=1, samples_per_prompt=1, run_id="first"))
    for step in range(4):
        group = GroupId(0, step)
        journal.append(ev.Leased(group=group, samples=[0], attempt=1, version=step, holder="rollout-0"))
        if step == 2:
            folder = CheckpointFolder(run_dir)
            (folder.begin(2) / "weights").write_bytes(b"weights")
            folder.seal(2)
            journal.append(ev.Checkpointed(step=2, path=str(folder.path(2))))
            folder.set_latest(2)
        journal.append(ev.RowReady(row=group.row(0), units=["relay-0"], version=step, num_tokens=9, reward=0.5))
        journal.append(ev.Handed(step=step, groups=[group]))
        journal.append(ev.Trained(step=step))
    journal.close()
    return run_dir


def resume(
    run_dir: Path, run_id: str = "second", mode: str = "auto", num_rows: tuple[int, ...] = ()
) -> tuple[HubState, Journal]:
    settings = RunSettings(dir=str(run_dir), resume=mode)  # pyright: ignore[reportArgumentType]
    recipe = Recipe(run=settings, batch=BatchSettings(samples_per_prompt=1), data=DataSettings(path=("a", "b")))
    return open_journal(run_dir, recipe, (), run_id, Clock(), num_rows)


def resumed_at(run_dir: Path, run_id: str = "second") -> tuple[int, int, int]:
    """Step, checkpoint and position in the data with which a run continues."""
    state, journal = resume(run_dir, run_id)
    journal.close()
    return state.step, state.checkpointed, state.cursor


def test_a_power_cut_while_a_run_is_resumed_leaves_a_run_that_can_be_resumed_from_the_same_checkpoint(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    with PowerCuts(run_dir, tmp_path / "cuts") as cuts:
        assert resumed_at(run_dir) == (2, 2, 2)
    assert len(cuts.left) > 10
    for left in cuts.left:
        assert choose_checkpoint(left)[0] == 2, left
        assert resumed_at(left, "third") == (2, 2, 2), left


def test_the_lines_that_a_resumed_run_gives_up_are_kept_beside_its_journal(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    before = (run_dir / "journal.jsonl").read_bytes()
    resumed_at(run_dir)
    (rest,) = run_dir.glob("journal.jsonl.discarded-*")
    after = (run_dir / "journal.jsonl").read_bytes()
    assert before.endswith(rest.read_bytes()) and after.startswith(before[: -len(rest.read_bytes())])
    assert not (run_dir / "journal.jsonl.new").exists()


def test_a_run_without_a_checkpoint_to_continue_takes_no_row_that_an_earlier_run_read(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    (run_dir / "stream.jsonl").write_text("old rows")
    resume(run_dir)[1].close()
    assert (run_dir / "stream.jsonl").exists(), "a run that continues needs them"
    (run_dir / "checkpoints/latest").unlink()
    for path in (run_dir / "checkpoints").glob("step_*"):
        path.rename(tmp_path / path.name)
    resume(run_dir, "third")[1].close()
    (kept,) = run_dir.glob("stream.jsonl.discarded-*")
    assert not (run_dir / "stream.jsonl").exists() and kept.read_text() == "old rows"


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_journal_of_a_run_that_still_runs_is_not_touched(tmp_path: Path, has_checkpoint: bool):
    run_dir = interrupted_run(tmp_path / "run")
    if not has_checkpoint:
        (run_dir / "checkpoints/latest").unlink()
    running = Journal(run_dir / "journal.jsonl")
    files = sorted(run_dir.iterdir())
    with pytest.raises(JournalError, match="in use by another process"):
        resume(run_dir)
    assert sorted(run_dir.iterdir()) == files
    running.close()


def test_the_next_process_of_a_resumed_runs_hub_continues_at_the_end_of_its_journal(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    resumed_at(run_dir)
    assert resumed_at(run_dir) == (2, 2, 2)
    kinds = [type(event).__name__ for _, event in read_events(run_dir / "journal.jsonl")][-3:]
    assert kinds == ["Opened", "Checkpointed", "HubRestarted"]


def test_a_folder_with_a_run_is_only_used_to_resume_it(tmp_path: Path):
    with pytest.raises(SettingError, match="holds a run; set run.resume=auto"):
        resume(interrupted_run(tmp_path / "run"), mode="never")


@pytest.mark.parametrize("num_rows", [(5, 8), (5,)])
def test_a_run_is_not_continued_with_another_number_of_rows(tmp_path: Path, num_rows: tuple[int, ...]):
    run_dir = interrupted_run(tmp_path / "run")
    resume(run_dir, num_rows=(5, 7))[1].close()  # the journal before does not say how many
    files = sorted(run_dir.iterdir())
    for run_id in ("second", "third"):  # started again within the run, and resumed
        with pytest.raises(SettingError, match=r"data\.path: (b has 8 rows, and .* began with 7|.* began with 2 sets)"):
            resume(run_dir, run_id, num_rows=num_rows)
    assert sorted(run_dir.iterdir()) == files
    resume(run_dir, "third", num_rows=(5, 7))[1].close()


def test_a_run_with_a_stream_is_not_continued_without_it(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    resume(run_dir, num_rows=(0,))[1].close()
    with pytest.raises(SettingError, match=r"data\.streaming: the run in .*run began with it"):
        resume(run_dir, "third", num_rows=(7,))
