"""Copies of the training state in the run folder: each is there whole or not at all, and those of all ranks make up a state."""

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.power_cut import PowerCuts

from headrace.relay.weights.copies_on_disk import HEAD_BYTES, CopiesOnDisk, CopyHead

CONTENT = np.arange(10_000, dtype=np.uint8)


class Usage(NamedTuple):
    free: int


def content_of(saved: CopiesOnDisk, step: int, rank: int) -> np.ndarray:
    content = np.empty_like(CONTENT)
    assert sum(saved.read(step, rank, content)) == CONTENT.nbytes
    return content


def write(saved: CopiesOnDisk, step: int, *ranks: int, num_ranks: int = 2, start: str = "1") -> None:
    for rank in ranks:
        saved.write(rank, CopyHead(step, f"{step:032x}", 11, CONTENT.nbytes, num_ranks, start), CONTENT)


def test_a_copy_is_read_as_it_was_written(tmp_path: Path):
    saved = CopiesOnDisk(tmp_path)
    write(saved, 7, 1)
    assert saved.head(7, 1) == CopyHead(7, f"{7:032x}", 11, CONTENT.nbytes, 2, "1")
    assert np.array_equal(content_of(saved, 7, 1), CONTENT)
    assert saved.head(7, 0) is None


@pytest.mark.parametrize("num_bytes", [0, 100, 4096, 5000])
def test_a_part_of_a_copy_is_none(tmp_path: Path, num_bytes: int):
    saved = CopiesOnDisk(tmp_path)
    write(saved, 7, 0)
    saved.file(7, 0).write_bytes(saved.file(7, 0).read_bytes()[:num_bytes])
    assert saved.head(7, 0) is None
    assert saved.newest(0, 9, 1) == (None, ["memory/step_7 lacks a whole actor-0.state"])


def test_a_power_cut_leaves_the_whole_copy_or_none(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with PowerCuts(tmp_path / "run", tmp_path / "cuts") as cuts:
        write(CopiesOnDisk(tmp_path / "run"), 7, 0)
    found: list[bool] = []
    for left in map(CopiesOnDisk, cuts.left):
        head = left.head(7, 0)
        assert left.file(7, 0).exists() == (head is not None)
        assert head is None or np.array_equal(content_of(left, 7, 0), CONTENT)
        found.append(head is not None)
    assert found[-1] and not all(found) and not cuts.lost_names()


def test_copies_are_begun_where_there_is_room_for_those_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved, room = CopiesOnDisk(tmp_path), 2 * (HEAD_BYTES + CONTENT.nbytes)

    def leave(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(num_bytes))

    leave(room - 1)
    with pytest.raises(OSError, match="No space") as raised:
        write(saved, 7, 0)
    assert raised.value.errno == errno.ENOSPC and not [*tmp_path.iterdir()]
    leave(room)
    write(saved, 7, 0)
    leave(room // 2)
    write(saved, 7, 1)


def test_an_older_copy_is_begun_where_all_ranks_have_room_for_it_though_one_lacks_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved, size = CopiesOnDisk(tmp_path), HEAD_BYTES + CONTENT.nbytes
    write(saved, 7, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * size - 1))
    with pytest.raises(OSError, match="No space"):
        write(saved, 5, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * size))
    write(saved, 5, 0)


def test_what_an_earlier_start_has_left_is_no_part_of_what_ranks_have_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved, size = CopiesOnDisk(tmp_path), HEAD_BYTES + CONTENT.nbytes
    write(saved, 7, 1, start="0")
    saved.file(7, 1).rename(saved.path(7) / "actor-1.by-actor-1")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * size - 1))
    with pytest.raises(OSError, match="No space"):
        write(saved, 7, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * size))
    write(saved, 7, 1)
    saved.file(7, 1).rename(saved.path(7) / "actor-1.by-actor-1.new")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size))
    write(saved, 7, 0)


def test_a_copy_that_is_not_wanted_any_more_gets_no_name(tmp_path: Path):
    saved = CopiesOnDisk(tmp_path)
    head = CopyHead(7, f"{7:032x}", 11, CONTENT.nbytes, 2, "1")
    saved.write(0, head, CONTENT, is_wanted=lambda: False)
    assert not [*tmp_path.iterdir()]


def test_the_newest_step_counts_of_which_all_ranks_have_a_copy_of_one_start(tmp_path: Path):
    saved = CopiesOnDisk(tmp_path)
    for step, ranks in ((4, (0, 1)), (6, (0, 1)), (8, (0,)), (9, (0,)), (12, (0, 1))):
        write(saved, step, *ranks)
    write(saved, 9, 1, start="2")
    lacking = ["memory/step_9 has copies of several starts of the run", "memory/step_8 lacks a whole actor-1.state"]
    assert saved.newest(0, 9, 2) == (6, lacking)
    assert saved.newest(0, 12, 2) == (12, [])
    assert saved.newest(4, 5, 2) == (None, [])
    assert saved.newest(4, 6, 1) == (None, ["memory/step_6 has the copies of 2 actor ranks, not 1"])


def test_the_folder_goes_with_its_last_step(tmp_path: Path):
    saved = CopiesOnDisk(tmp_path)
    write(saved, 4, 0)
    write(saved, 6, 0)
    saved.remove(range(6))
    assert saved.steps() == [6]
    saved.remove([6, 7])
    assert not saved.root.exists()
