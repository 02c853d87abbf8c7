"""A run whose disk is full waits and goes on, or ends whole with its account."""

from pathlib import Path

import pytest
from support.job import MakeJob, assert_account_adds_up
from support.small_disk import fill, small_disk


def wait_for_line(run, text: str) -> None:
    """Wait until the run's output has a line with this text."""
    run.until(lambda: text in run.console.read_text())


def test_a_run_on_a_full_disk_waits_for_room_and_trains_to_its_end(job: MakeJob, tmp_path: Path):
    with small_disk(tmp_path / "disk", megabytes=16) as disk:
        run = job(run__steps=30, run__dir=disk / "run", checkpoint__every=10)
        run.dir = disk / "run"
        run.start().wait_for_step(1)
        ballast = fill(disk)
        wait_for_line(run, "run.dir is full")
        ballast.unlink()
        code, output = run.end()
        assert code == 0, output + run.logs()
        assert [m["step"] for m in run.metrics()] == list(range(30))
        assert assert_account_adds_up(run)["trained"] == 30 * 16


@pytest.mark.slow
def test_a_run_whose_disk_stays_full_ends_with_its_account_and_says_why(job: MakeJob, tmp_path: Path):
    with small_disk(tmp_path / "disk", megabytes=16) as disk:
        run = job(run__steps=1000, run__dir=disk / "run", comm__deadline_s=40)
        run.dir = disk / "run"
        run.start().wait_for_step(1)
        fill(disk)
        code, output = run.end()
        assert code == 1, output
        assert "run.dir is full" in run.summary()["error"]
        assert "error: " in output and "make room there" in output
        assert_account_adds_up(run)
