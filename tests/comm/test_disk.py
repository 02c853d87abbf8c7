"""A full disk is named on the console, waited for, and leaves files whole."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.faults.read_only import read_only
from support.small_disk import fill, small_disk, use_up_inodes

from headrace.comm import disk as disk_module
from headrace.comm.clock import Clock
from headrace.comm.disk import AppendFile, DiskReserve, raise_if_unwritable
from headrace.comm.errors import DiskFull
from headrace.comm.trace import Trace
from headrace.launch.processes.child import Child
from headrace.relay.checkpoints import CheckpointFolder
from headrace.trainer.record.trackers.board import Board
from headrace.trainer.step_log import StepLog


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", megabytes=2) as folder:
        yield folder


def test_a_record_that_does_not_fit_is_written_whole_once_there_is_room(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file, records = AppendFile(disk / "lines", deadline_s=60), [bytes([65 + i]) * 5000 + b"\n" for i in range(3)]
    file.append(records[0])
    ballast, said = fill(disk), threading.Event()
    say = disk_module.say
    monkeypatch.setattr(disk_module, "say", lambda text: (say(text), said.set()))
    writer = threading.Thread(target=lambda: [file.append(record) for record in records[1:]])
    writer.start()
    assert said.wait(60)
    assert (disk / "lines").read_bytes() == records[0], "no part of a record"
    ballast.unlink()
    writer.join(60)
    file.close()
    assert (disk / "lines").read_bytes() == b"".join(records)
    full, again = capsys.readouterr().out.splitlines()
    assert full.startswith(f"run.dir is full: {disk / 'lines'}") and "0 bytes free" in full
    assert "can be written again" in again


def test_a_new_file_waits_while_its_folder_is_read_only(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    said, say, opened = threading.Event(), disk_module.say, list[Board]()
    monkeypatch.setattr(disk_module, "say", lambda text: (say(text), said.set()))
    starter = threading.Thread(target=lambda: opened.append(Board(disk / "tensorboard", 3, deadline_s=60)))
    with read_only([disk]):
        starter.start()
        assert said.wait(60)
        with pytest.raises(OSError, match="Read-only"):
            raise_if_unwritable(disk)
    starter.join(60)
    opened[0].end(None)
    refused, again = capsys.readouterr().out.splitlines()
    assert refused.startswith(f"run.dir is read-only: {disk / 'tensorboard'} cannot be written")
    assert "can be written again" in again


def test_a_new_file_waits_for_an_inode_and_the_message_names_inodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    said, say = threading.Event(), disk_module.say
    monkeypatch.setattr(disk_module, "say", lambda text: (say(text), said.set()))
    with small_disk(tmp_path / "disk", megabytes=2, inodes=20) as disk:
        taken, opened = use_up_inodes(disk), list[Board]()
        starter = threading.Thread(target=lambda: opened.append(Board(disk / "tensorboard", 3, deadline_s=60)))
        starter.start()
        assert said.wait(60)
        for file in taken:
            file.unlink()
        starter.join(60)
        (board,) = opened
        board.step(3, {"loss": 1.0}, {})
        board.end(None)
        said.clear()
        taken = use_up_inodes(disk)
        with pytest.raises(DiskFull, match="no inode free for another file, with [0-9,]+ bytes free"):
            AppendFile(disk / "lines", deadline_s=0.1)
        Trace(disk, "rollout-0", Clock()).close()
    assert "no inode free" in capsys.readouterr().out


def test_nothing_makes_a_run_folder_again_that_is_gone(tmp_path: Path):
    """Files written there would belong to no run."""
    gone = tmp_path / "run"
    with pytest.raises(FileNotFoundError):
        Board(gone / "tensorboard", 0, deadline_s=1)
    with pytest.raises(FileNotFoundError):
        StepLog(gone).write(1)
    with pytest.raises(FileNotFoundError):
        CheckpointFolder(gone).begin(1)
    with pytest.raises(FileNotFoundError):
        CheckpointFolder(gone).set_latest(1)
    with pytest.raises(FileNotFoundError):
        Trace(gone, "rollout-0", Clock())
    with pytest.raises(FileNotFoundError):
        Child("rollout-0", [sys.executable, "-c", ""], log=gone / "logs" / "rollout-0.log")
    assert not gone.exists()


def test_a_disk_that_stays_full_is_an_error_that_names_it_and_the_file_is_as_before(disk: Path):
    file = AppendFile(disk / "lines", deadline_s=0.2)
    file.append(b"first\n")
    fill(disk)
    with pytest.raises(DiskFull, match=r"run\.dir is full: .*/lines .* bytes free.*another run\.dir"):
        file.append(bytes(8192))
    file.close()
    assert (disk / "lines").read_bytes() == b"first\n"


def test_a_reserve_is_room_that_nothing_else_took(disk: Path):
    reserve = DiskReserve(disk)
    fill(disk)
    with pytest.raises(OSError, match="No space"):
        raise_if_unwritable(disk)
    reserve.release()
    raise_if_unwritable(disk)
    assert [path.name for path in disk.iterdir()] == ["ballast"]


def test_a_trace_leaves_out_lines_that_do_not_fit(disk: Path):
    trace = Trace(disk, "rollout-0", Clock())
    fill(disk)
    for number in range(200):
        trace.enter(f"state {number}")
    trace.close()
