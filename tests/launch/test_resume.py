"""A run resumes from the newest checkpoint that is whole and in the journal, and says so."""

from pathlib import Path

import pytest
from support.emulated_run import EMULATED

from headrace.comm.errors import SettingError
from headrace.launch.config.load import read_recipe
from headrace.launch.processes.rank import prepare
from headrace.launch.resume import choose_checkpoint
from headrace.relay.checkpoints import CheckpointFolder
from headrace.relay.hub.exits import ProcessExit, report_exit, take_exits
from headrace.relay.journal.events import Checkpointed, Opened, Trained
from headrace.relay.journal.journal import Journal


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


def test_the_newest_whole_checkpoint_of_the_journal_is_taken_and_the_reason_told(run_dir: Path):
    step, lines = choose_checkpoint(run_dir)
    assert step == 4
    assert "step_6 is not in the journal" in lines[0] and "continues after step 4" in lines[1]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run_dir: Path):
    (run_dir / "checkpoints/step_4/dcp/data").write_bytes(bytes(99) + b"\1")
    step, lines = choose_checkpoint(run_dir)
    assert step == 2
    assert any("step_4 holds other bytes in dcp/data" in line for line in lines)


def test_a_dangling_or_empty_pointer_does_not_hide_whole_checkpoints(run_dir: Path):
    for content in ("step_99", ""):
        (run_dir / "checkpoints/latest").write_text(content)
        assert choose_checkpoint(run_dir)[0] == 4


def test_no_usable_checkpoint_is_a_mistake_in_the_settings_with_every_reason(run_dir: Path):
    (run_dir / "checkpoints/step_2/manifest.json").unlink()
    (run_dir / "checkpoints/step_4/dcp/data").unlink()
    with pytest.raises(SettingError, match=r"run\.resume.*step_6 is not in.*step_4 lacks dcp/data.*step_2 was not"):
        choose_checkpoint(run_dir)
    (run_dir / "journal.jsonl").unlink()
    with pytest.raises(SettingError, match=r"run\.resume.*step_4 is not in the journal"):
        choose_checkpoint(run_dir)


def test_a_run_without_checkpoints_says_that_it_starts_at_step_1(tmp_path: Path):
    step, lines = choose_checkpoint(tmp_path)
    assert step is None and "no checkpoint; the run starts at step 1" in lines[0]


def test_the_reports_of_the_run_before_are_removed_before_the_next_one_starts(tmp_path: Path):
    report_exit(tmp_path, ProcessExit("rollout-7", 7, "rollout-7 was ended by SIGKILL", ends_run=True))
    (data := tmp_path / "data.jsonl").write_text('{"prompt": "p"}\n')
    words = [f"{name}={value}" for name, value in EMULATED.items()]
    prepare(read_recipe(None, [*words, f"run.dir={tmp_path}", f"data.path={data}"]))
    assert take_exits(tmp_path) == []
