"""A start of a run waits for the supervisors of the start before that still write copies of the training state."""

import itertools
import math
import threading
from pathlib import Path

import pytest

from headrace.launch.processes import copies_lock
from headrace.launch.processes.copies_lock import lock_to_write, wait_for_writers


def test_a_start_waits_until_no_one_writes_any_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    locks = [lock_to_write(tmp_path) for _ in range(2)]

    def write() -> None:
        (tmp_path / "copy").touch()
        for lock in locks:
            assert lock is not None
            lock.close()

    threading.Timer(0.3, write).start()
    wait_for_writers(tmp_path, 60, 60)
    assert (tmp_path / "copy").exists()
    assert capsys.readouterr().err.count("the run waits for them") == 1


def test_a_start_waits_for_no_one_where_no_one_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wait_for_writers(tmp_path, 60, 60)
    assert not [*tmp_path.iterdir()]
    lock = lock_to_write(tmp_path)
    assert lock is not None
    lock.close()
    wait_for_writers(tmp_path, 60, 60)
    assert not capsys.readouterr().err


def test_a_start_does_not_wait_for_what_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sizes = iter([0, 5, 9, 9])
    monkeypatch.setattr(copies_lock, "folder_bytes", lambda _: next(sizes))
    lock = lock_to_write(tmp_path)
    wait_for_writers(tmp_path, 0.01, math.inf)
    assert "the run continues without their copies" in capsys.readouterr().err and not [*sizes]
    assert lock is not None
    lock.close()


def test_a_start_for_which_others_wait_does_not_wait_for_all_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sizes = itertools.count()
    monkeypatch.setattr(copies_lock, "folder_bytes", lambda _: next(sizes))
    lock = lock_to_write(tmp_path)
    wait_for_writers(tmp_path, 0.01, 0.1)
    assert "the run continues without their copies" in capsys.readouterr().err and next(sizes) > 2
    assert lock is not None
    lock.close()
