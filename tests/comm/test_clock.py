"""Times as the console says them: since the start of a run, and until its end."""

import time

import pytest

from headrace.comm.clock import STARTED, TimeLeft, begin, clock_text, elapsed_s
from headrace.comm.disk import tell


def test_times_are_written_as_a_clock_shows_them():
    assert [clock_text(seconds) for seconds in (0.9, 67, 754.2, 3723)] == ["0:00", "1:07", "12:34", "1:02:03"]


def test_a_process_counts_from_the_start_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(STARTED, str(time.time() - 754))
    begin(is_new=False)
    tell("first reward")
    assert capsys.readouterr().out in ("  12:34  first reward\n", "  12:35  first reward\n")
    begin()
    assert elapsed_s() < 700


@pytest.mark.parametrize("start", ["", "yesterday", "9e12"])
def test_a_start_that_says_nothing_counts_as_now(monkeypatch: pytest.MonkeyPatch, start: str):
    monkeypatch.setenv(STARTED, start)
    assert elapsed_s() == 0.0


def test_the_time_left_is_that_of_the_last_steps_without_the_first():
    left = TimeLeft(num_steps=400)
    assert left.after(0, 500.0) is None
    assert left.after(1, 20.0) == 398 * 20.0
    for step in range(2, 399):
        assert left.after(step, 10.0)
    assert left.after(399, 10.0) == 0.0
