"""A run as its Python caller sees it: lines, errors and interrupts. The launcher is a shell script here."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.launch.python.watched_run import NewSteps, RunEnd, WatchedRun, last_log_lines

PYTHON = sys.executable


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a script in the place of the launcher, with the run folder as `$RUN`."""

    def run(script: str, on_step: Any = None) -> RunEnd:
        program = tmp_path / "a launcher"
        program.write_text(f"#!/bin/bash\n{script}")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setenv("RUN", str(tmp_path))
        return WatchedRun(tmp_path, on_step).run([])

    return run


def until_interrupted(*words: str, num_steps: int = 1) -> str:
    """A script that writes the metrics of steps and prints a word at each interrupt, at last with exit code 130.

    It is a Python program: bash loses a signal that comes while it handles another, and all of them if they were ignored at its start.
    """
    program = f"""
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
with open(os.environ["RUN"] + "/metrics.jsonl", "w") as file:
    file.writelines('{{"step": %d}}\\n' % step for step in range({num_steps}))
for word in {words!r}:
    signal.sigwait([signal.SIGINT])
    print(word, flush=True)
sys.exit(130)
"""
    return f"exec {shlex.quote(PYTHON)} -c {shlex.quote(program)}"


def test_lines_are_shown_and_the_last_error_of_a_refused_start_is_the_exception_s(watched, capsys):
    end = watched("echo one; echo headrace: error: early >&2; echo two; echo headrace: error: run.steps: no; exit 2")
    assert end == RunEnd(2, "run.steps: no")
    assert capsys.readouterr().out == "one\nheadrace: error: early\ntwo\n"


def test_an_error_of_several_lines_is_whole_and_one_of_a_failed_run_is_shown(watched, capsys):
    assert watched("echo headrace: error: a; echo '    b'; exit 2") == RunEnd(2, "a\n    b")
    assert watched("echo headrace: error: a; exit 1") == RunEnd(1, "a")
    assert capsys.readouterr().out == "headrace: error: a\n    b\nheadrace: error: a\n"


@pytest.mark.parametrize(
    "error", [OSError(28, "no space"), KeyboardInterrupt(), SystemExit(3), ValueError("mine")], ids=repr
)
def test_an_error_of_the_callback_ends_the_run_in_order_and_is_raised_as_it_is(watched, capsys, error: BaseException):
    def fail(metrics: dict[str, Any]) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        watched(until_interrupted("ended in order"), fail)
    assert raised.value is error
    assert capsys.readouterr().out == "ended in order\n"


def test_a_second_ctrl_c_reaches_the_launcher_too(watched, monkeypatch: pytest.MonkeyPatch, capsys):
    """The first one is raised by the callback, the second while the run ends."""
    show = WatchedRun._show

    def interrupted_again(self: WatchedRun, lines: Any) -> None:
        found = list(lines)
        show(self, iter(found))
        if "ending" in found:
            raise KeyboardInterrupt

    def interrupt(metrics: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchedRun, "_show", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        watched(until_interrupted("ending", "killed"), interrupt)
    assert "killed" in capsys.readouterr().out


def test_an_interrupt_after_the_second_does_not_wait_for_a_launcher_that_goes_on(
    watched, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(metrics: dict[str, Any]) -> None:
        monkeypatch.setattr(WatchedRun, "_show", lambda self, lines: interrupt({}))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(until_interrupted("one", "two", "three", "four"), interrupt)


def test_true_ends_the_run_and_nothing_else_does(watched):
    seen = list[int]()

    def on_step(metrics: dict[str, Any]) -> object:
        seen.append(metrics["step"])
        return True if metrics["step"] == 1 else "go on"

    assert watched(until_interrupted("ended", num_steps=3), on_step).code == 130
    assert seen == [0, 1]


def test_a_slow_callback_does_not_hold_up_a_run_that_prints_much(watched, tmp_path: Path, capsys):
    """More than a pipe holds. The callback returns only when the launcher has printed everything."""

    def wait(metrics: dict[str, Any]) -> None:
        assert os.read(fifo, 1) == b"."

    os.mkfifo(tmp_path / "done")
    fifo = os.open(tmp_path / "done", os.O_RDWR)
    script = 'echo "{\\"step\\": 0}" > "$RUN/metrics.jsonl"; for i in {1..20000}; do echo line $i; done; echo -n . > "$RUN/done"'
    assert watched(script, wait) == RunEnd(0, "")
    os.close(fifo)
    assert capsys.readouterr().out.splitlines()[-1] == "line 20000"


def write(path: Path, *steps: int, mode: str = "a", end: str = "\n") -> None:
    with path.open(mode) as file:
        file.write("\n".join(json.dumps({"step": step}) for step in steps) + end)


def test_each_new_step_is_read_once(tmp_path: Path):
    """Not those of an earlier run in the folder, nor those that a trainer repeats; a line is read when it is whole."""
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    steps = NewSteps(path)
    assert [*steps.read()] == []
    write(path, 3, end="")
    assert [*steps.read()] == []
    write(path, mode="a")
    assert [*steps.read()] == [{"step": 3}]
    os.truncate(path, len('{"step": 0}\n') * 2)
    assert [*steps.read()] == []
    write(path, 2, 3, 4)
    assert [*steps.read()] == [{"step": 4}]


def test_the_steps_that_a_resumed_run_gave_up_are_read_when_they_are_trained_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    steps = NewSteps(path)
    os.truncate(path, len('{"step": 0}\n'))
    assert [*steps.read()] == []
    write(path, 1)
    assert [*steps.read()] == [{"step": 1}]


def test_a_file_that_was_cut_and_has_grown_since_the_last_look_is_read_in_whole_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    steps = NewSteps(path)
    write(path, *range(6))
    assert len([*steps.read()]) == 6
    write(path, 0, 1, mode="w")
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "again": True}) + "\n" for step in range(2, 9))
    assert [each["step"] for each in steps.read()] == [6, 7, 8]


def test_a_run_that_starts_again_has_new_steps(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    steps = NewSteps(path)
    path.rename(tmp_path / "metrics.jsonl.discarded-1")
    write(path, 0, 1, 2)
    assert [*steps.read()] == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_the_logs_of_a_failed_run_are_shown_where_they_have_a_traceback(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "actor-0.log").write_text("Traceback (most recent call last):\n  here\nValueError: bad\n")
    (tmp_path / "logs" / "hub.log").write_text("fine\n")
    (tmp_path / "logs" / "relay-0.log").touch()
    told = last_log_lines(tmp_path)
    assert told.endswith("actor-0.log:\n    Traceback (most recent call last):\n      here\n    ValueError: bad")
    (tmp_path / "logs" / "actor-0.log").unlink()
    os.utime(tmp_path / "logs" / "relay-0.log", (1, 1))
    assert last_log_lines(tmp_path).endswith("hub.log:\n    fine")
    assert last_log_lines(tmp_path / "nowhere") == ""
