"""A resumed run's journal replaces the one before in a single step, whenever the power is cut."""

from pathlib import Path

import msgspec
import pytest
from support.power_cut import PowerCuts

from headrace.comm.clock import Clock
from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId
from headrace.comm.recipe import BatchSettings, DataSettings, Recipe, RunSettings
from headrace.launch.resume import choose_point, prepare_folder
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import JournalError, read_events
from headrace.relay.journal.journal import Journal
from headrace.relay.journal.opening import check_journal_is_there, open_journal
from headrace.relay.journal.replay import recover, replay
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
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(4)))
    (run_dir / "rows").mkdir()
    (run_dir / "rows/step_3.safetensors").write_bytes(b"those of the step before are missing")
    return run_dir


def recipe_of(run_dir: Path, mode: str = "auto") -> Recipe:
    settings = RunSettings(dir=str(run_dir), resume=mode)  # pyright: ignore[reportArgumentType]
    return Recipe(run=settings, batch=BatchSettings(samples_per_prompt=1), data=DataSettings(path=("a", "b")))


def resume(run_dir: Path, run_id: str = "second", num_rows: tuple[int, ...] = ()) -> tuple[HubState, Journal]:
    """The work of the launcher, unless the hub is started again within the run; then the work of the hub."""
    recipe, journal = recipe_of(run_dir), run_dir / "journal.jsonl"
    if not journal.exists() or recover(journal).opened.run_id != run_id:
        prepare_folder(recipe)
    return open_journal(recipe, (), run_id, Clock(), num_rows)


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
        assert choose_point(recipe_of(left))[:2] == (2, 2), left
        assert resumed_at(left, "third") == (2, 2, 2), left


def test_a_run_without_an_old_file_of_its_journal_is_not_resumed_and_the_file_is_named(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    journal = Journal(run_dir / "journal.jsonl")
    journal.part_bytes = 0
    journal.keep(recover(journal.path))
    journal.close()
    assert choose_point(recipe_of(run_dir))[:2] == (2, 2)
    (run_dir / "journal/0.jsonl").unlink()
    with pytest.raises(
        SettingError, match=r"run\.resume: .*the file that begins with byte 0 of the journal is missing"
    ):
        choose_point(recipe_of(run_dir))


def test_the_lines_that_a_resumed_run_gives_up_are_kept_beside_its_journal(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    before = (run_dir / "journal.jsonl").read_bytes()
    resumed_at(run_dir)
    (rest,) = run_dir.glob("journal.jsonl.discarded-*")
    after = (run_dir / "journal.jsonl").read_bytes()
    assert before.endswith(rest.read_bytes()) and after.startswith(before[: -len(rest.read_bytes())])
    (metrics,) = run_dir.glob("metrics.jsonl.discarded-*")
    assert metrics.read_text() == '{"step": 2}\n{"step": 3}\n'
    assert {path.name for path in run_dir.glob("rows.discarded-1/*")} == {"step_3.safetensors"}
    assert not (run_dir / "journal.jsonl.new").exists()


def test_the_journal_of_a_run_that_still_runs_is_not_touched(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    running = Journal(run_dir / "journal.jsonl")
    before = (run_dir / "journal.jsonl").read_bytes()
    with pytest.raises(SettingError, match="in use by another process"):
        prepare_folder(recipe_of(run_dir))
    with pytest.raises(JournalError, match="in use by another process"):
        open_journal(recipe_of(run_dir), (), "second", Clock())
    assert (run_dir / "journal.jsonl").read_bytes() == before
    running.close()


def test_the_next_process_of_a_resumed_runs_hub_continues_at_the_end_of_its_journal(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    resumed_at(run_dir)
    assert resumed_at(run_dir) == (2, 2, 2)
    kinds = [type(event).__name__ for _, event in read_events(run_dir / "journal.jsonl")][-3:]
    assert kinds == ["Checkpointed", "Opened", "HubRestarted"]


def test_a_folder_with_a_run_is_only_used_to_resume_it(tmp_path: Path):
    run_dir = interrupted_run(tmp_path / "run")
    with pytest.raises(SettingError, match="holds a run; set run.resume=auto"):
        open_journal(recipe_of(run_dir, "never"), (), "second", Clock())


@pytest.mark.parametrize("num_rows", [(5, 8), (5,)])
def test_a_run_is_not_continued_with_another_number_of_rows(tmp_path: Path, num_rows: tuple[int, ...]):
    run_dir = interrupted_run(tmp_path / "run")
    resume(run_dir, num_rows=(5, 7))[1].close()  # the journal before does not say how many
    files = sorted(run_dir.iterdir())
    for run_id in ("second", "third"):  # started again within the run, and resumed
        with pytest.raises(SettingError, match=r"data\.path: (b has 8 rows, and .* began with 7|.* began with 2 sets)"):
            open_journal(recipe_of(run_dir), (), run_id, Clock(), num_rows)
    assert sorted(run_dir.iterdir()) == files
    resume(run_dir, "third", num_rows=(5, 7))[1].close()


def test_a_hub_that_is_started_again_opens_no_empty_journal_in_place_of_one_that_is_gone(tmp_path: Path):
    check_journal_is_there(tmp_path, incarnation=2)  # the first one died before it had one
    _, journal = resume(tmp_path)
    check_journal_is_there(tmp_path, incarnation=2)
    (tmp_path / "journal.jsonl").unlink()
    with pytest.raises(SettingError, match=r"run\.dir: .*journal\.jsonl was removed while the run was under way"):
        check_journal_is_there(tmp_path, incarnation=2)
    check_journal_is_there(tmp_path, incarnation=1)
    journal.close()


def test_a_storage_unit_that_was_lost_before_the_checkpoint_may_have_its_name_again_after_a_resume(tmp_path: Path):
    """Relays of the next run count their incarnations from 1 again."""
    run_dir = interrupted_run(tmp_path / "run")
    journal = run_dir / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lost = msgspec.json.encode(ev.UnitLost(unit="relay-0#1", reason="killed")) + b"\n"
    journal.write_bytes(b"".join([lines[0], lost, *lines[1:]]))
    assert replay(journal).lost_storage_ids == {"relay-0#1"}
    state, resumed = resume(run_dir)
    resumed.close()
    assert not state.lost_storage_ids and not replay(journal).lost_storage_ids
