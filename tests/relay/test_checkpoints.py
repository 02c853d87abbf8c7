"""A checkpoint counts as whole only when all of it is on the disk, and none that is needed is removed."""

from pathlib import Path

import pytest
from support.power_cut import PowerCuts

from headrace.comm.errors import SettingError
from headrace.relay.checkpoints import CheckpointFolder


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path)


def write(folder: CheckpointFolder, step: int, *, score: float | None = None, is_whole: bool = True) -> Path:
    path = folder.begin(step)
    for name in ("dcp/__0_0.distcp", "hf/model.safetensors"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(bytes(range(100)))
    if is_whole:
        folder.seal(step, score)
    return path


def steps(folder: CheckpointFolder) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.root.glob("step_*"))


def test_a_sealed_checkpoint_has_no_problem_and_each_damage_is_named(folder: CheckpointFolder):
    path = write(folder, 4)
    data = path / "dcp/__0_0.distcp"
    assert folder.problem(4) == ""
    assert folder.problem(5) == "is missing"
    data.write_bytes(bytes([*range(50), 0, *range(51, 100)]))
    assert "has a damaged dcp/__0_0.distcp" in folder.problem(4)
    data.write_bytes(bytes(range(60)))
    assert "60 of 100 bytes of dcp/__0_0.distcp" in folder.problem(4)
    data.unlink()
    assert "lacks dcp/__0_0.distcp" in folder.problem(4)
    (path / "manifest.json").write_bytes(b'{"step": 4')
    assert "is incomplete" in folder.problem(4)


def test_of_a_checkpoint_that_latest_names_a_power_cut_takes_neither_a_byte_nor_a_name(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with PowerCuts(tmp_path / "run", tmp_path / "cuts") as cuts:
        folder = CheckpointFolder(tmp_path / "run")
        write(folder, 4)
        folder.set_latest(4)
    left = CheckpointFolder(cuts.left[-1])  # without the bytes that are not synced
    assert (left.problem(4), left.latest()) == ("", 4)
    assert not cuts.lost_names()


def test_a_checkpoint_that_is_written_again_is_not_whole_meanwhile(folder: CheckpointFolder):
    write(folder, 4)
    folder.begin(4)
    assert (folder.whole(), folder.problem(4)) == ({}, "is incomplete (no manifest.json)")


def test_the_newest_stay_and_the_one_that_latest_names_and_the_best(folder: CheckpointFolder):
    for step, score in enumerate((0.1, 0.9, 0.9, 0.3, 0.2, 0.5), 1):
        write(folder, step, score=score)
    folder.set_latest(4)
    folder.prune(6, keep=1, keep_best=True)
    assert steps(folder) == [3, 4, 6]
    folder.prune(6, keep=1)
    assert steps(folder) == [4, 6]


def test_a_checkpoint_that_may_get_a_score_yet_stays_until_it_has_one(folder: CheckpointFolder):
    for step in (2, 4, 6, 8):
        write(folder, step)
    folder.set_score(2, 0.5)
    folder.prune(8, keep=1, keep_best=True, unscored_after=4)
    assert steps(folder) == [2, 6, 8]
    folder.set_score(6, 0.7)
    folder.set_score(4, 0.9)  # it was removed meanwhile
    folder.prune(8, keep=1, keep_best=True, unscored_after=8)
    assert steps(folder) == [6, 8] and (folder.root / "best").read_text() == "step_6"
    assert folder.problem(6) == "", "a score changes no digest"


def test_only_checkpoints_that_can_be_resumed_from_use_up_the_number_to_keep(folder: CheckpointFolder):
    write(folder, 2)
    (folder.path(3) / "hf").mkdir(parents=True)  # the export of a run that ended
    write(folder, 4, is_whole=False)
    write(folder, 9)  # of a run that was resumed from step 2
    write(folder, 5)
    folder.set_latest(5)
    folder.prune(5, keep=2)
    assert steps(folder) == [2, 3, 5, 9]


def test_a_damaged_name_of_the_newest_does_not_end_the_removal_of_old_ones(folder: CheckpointFolder):
    for step in (1, 2, 3):
        write(folder, step)
    (folder.root / "latest").write_text("?")
    folder.prune(3, keep=2)
    assert steps(folder) == [2, 3]


def test_a_pointer_without_a_name_is_a_mistake_in_the_settings(folder: CheckpointFolder):
    assert folder.latest() is None
    folder.set_latest(7)
    assert folder.latest() == 7
    (folder.root / "latest").write_text("")
    with pytest.raises(SettingError, match=r"run\.resume.*latest"):
        folder.latest()
