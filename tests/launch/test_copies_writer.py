"""The supervisors of a run that fails write the copies of the training state that no checkpoint has."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.comm.environment import SECOND_FD, SEGMENT_FD
from headrace.comm.memfd import create_memory
from headrace.comm.shared_memory import Segment
from headrace.launch.config.run_folder import start_in
from headrace.launch.placement import Placement
from headrace.launch.processes.copies_writer import CopiesWriter
from headrace.relay.checkpoints import CheckpointFolder, write_durably
from headrace.relay.weights import copies_on_disk
from headrace.relay.weights.copies_on_disk import CopiesOnDisk, CopyHead
from headrace.relay.weights.slots import VersionSlots

NUM_BYTES = 5000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()
    return tmp_path


@pytest.fixture
def memory() -> Iterator[int]:
    """That of a supervisor, with the copies of steps 3 and 6."""
    fd = memory_with_copies(incarnation=1)
    yield fd
    os.close(fd)


def memory_with_copies(incarnation: int) -> int:
    fd = create_memory("copies")
    with closing(Segment(os.dup(fd), "")) as segment:
        slots = VersionSlots(segment, 2)
        slots.prepare(NUM_BYTES, 11)
        for step in (3, 6):
            write = slots.begin(step, incarnation)
            assert write is not None
            segment.slot(write.slot)[:] = step
            slots.commit(write, f"{step:032x}")
    return fd


def copies_of(run_dir: Path, start: str | None = None, rank: int = 1) -> CopiesWriter:
    placement = Placement("actor", rank, host=0, slot=0)
    return CopiesWriter(run_dir, placement, 2, start_in(run_dir) if start is None else start)


def content_of(saved: CopiesOnDisk, step: int, rank: int) -> bytes:
    content = np.empty(NUM_BYTES, np.uint8)
    assert sum(saved.read(step, rank, content)) == NUM_BYTES
    return content.tobytes()


def checkpoint(run_dir: Path, step: int, *, is_in_journal: bool) -> None:
    folder = CheckpointFolder(run_dir)
    (folder.begin(step) / "dcp").mkdir()
    folder.seal(step)
    if is_in_journal:
        folder.set_latest(step)


def test_both_copies_are_written_as_they_are_in_memory(run_dir: Path, memory: int):
    copies_of(run_dir).write({SEGMENT_FD: memory}, has_ended=False)
    saved = CopiesOnDisk(run_dir)
    assert saved.steps() == [3, 6]
    for step in (3, 6):
        assert saved.head(step, 1) == CopyHead(step, f"{step:032x}", 11, NUM_BYTES, 2, start_in(run_dir))
        assert content_of(saved, step, 1) == bytes([step]) * NUM_BYTES


@pytest.mark.parametrize(
    ("is_in_journal", "has_ended", "left"), [(True, False, [6]), (False, False, [3, 6]), (False, True, [6])]
)
def test_a_checkpoint_makes_copies_superfluous_once_a_resumed_run_can_use_it(
    run_dir: Path, memory: int, is_in_journal: bool, has_ended: bool, left: list[int]
):
    checkpoint(run_dir, 3, is_in_journal=is_in_journal)
    copies_of(run_dir).write({SEGMENT_FD: memory}, has_ended=has_ended)
    assert CopiesOnDisk(run_dir).steps() == left


def test_a_run_that_ended_in_order_leaves_no_copies(run_dir: Path, memory: int, capsys: pytest.CaptureFixture[str]):
    checkpoint(run_dir, 6, is_in_journal=False)
    copies_of(run_dir, rank=0).write({SEGMENT_FD: memory}, has_ended=True)
    assert not (run_dir / "memory").exists() and capsys.readouterr() == ("", "")


def test_a_run_that_ended_in_order_removes_the_copies_of_an_earlier_start_that_its_journal_needs_no_more(
    run_dir: Path, memory: int
):
    saved = CopiesOnDisk(run_dir)
    for step in (5, 6):
        saved.write(0, CopyHead(step, "0", 11, 1, 1, "of an earlier start"), np.zeros(1, np.uint8))
    checkpoint(run_dir, 5, is_in_journal=True)
    checkpoint(run_dir, 6, is_in_journal=False)
    copies_of(run_dir, rank=0).write({SEGMENT_FD: memory}, has_ended=True)
    assert saved.steps() == [6]


@pytest.mark.parametrize("start", ["", "of another run"])
def test_nothing_is_written_once_the_folder_has_another_start_or_where_it_is_not_the_runs(
    run_dir: Path, memory: int, start: str
):
    copies_of(run_dir, start).write({SEGMENT_FD: memory}, has_ended=False)
    assert not (run_dir / "memory").exists()


def test_a_copy_that_is_written_while_another_start_begins_gets_no_name(
    run_dir: Path, memory: int, monkeypatch: pytest.MonkeyPatch
):
    def write_slowly(*args: Any) -> None:
        write_durably(*args)
        os.utime(run_dir / "config.yaml", (1, 1))  # as the next start does

    monkeypatch.setattr(copies_on_disk, "write_durably", write_slowly)
    copies_of(run_dir).write({SEGMENT_FD: memory}, has_ended=False)
    assert not [*run_dir.glob("memory/step_*/*")]


def test_the_memory_of_a_trainer_that_made_no_copy_leaves_nothing(run_dir: Path):
    copies_of(run_dir).write({SEGMENT_FD: (fd := create_memory("copies"))}, has_ended=False)
    os.close(fd)
    assert not (run_dir / "memory").exists()


def test_one_rank_says_what_is_written_and_each_what_is_not(
    run_dir: Path, memory: int, capsys: pytest.CaptureFixture[str]
):
    for rank in (0, 1):
        copies_of(run_dir, rank=rank).write({SEGMENT_FD: memory}, has_ended=False)
    (told,) = capsys.readouterr().err.splitlines()
    assert f"step 6 to {run_dir}/memory/step_6 (" in told
    (run_dir / "memory").rename(run_dir / "other")
    (run_dir / "memory").touch()
    copies_of(run_dir).write({SEGMENT_FD: memory}, has_ended=False)
    assert "actor-1: a copy of the training state cannot be written to" in capsys.readouterr().err


def test_the_copies_of_a_rank_of_another_host_are_written_unless_its_own_supervisor_has(run_dir: Path, memory: int):
    second = memory_with_copies(incarnation=0)  # of rank 0
    saved = CopiesOnDisk(run_dir)
    own = CopyHead(6, f"{6:032x}", 11, 1, 2, start_in(run_dir))
    saved.write(0, own, np.zeros(1, np.uint8))
    copies_of(run_dir).write({SEGMENT_FD: memory, SECOND_FD: second}, has_ended=False)
    os.close(second)
    assert saved.newest(0, 9, 2) == (6, []) and saved.newest(0, 5, 2) == (3, [])
    assert saved.head(6, 0) == own
    assert content_of(saved, 3, 0) == bytes([3]) * NUM_BYTES
