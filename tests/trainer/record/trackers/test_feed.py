"""A tracker that fails, hangs or is missing costs the run nothing but its own numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_wandb import FakeWandb
from support.polling import wait_for

from headrace.comm.process_tree import children_of
from headrace.trainer.record.trackers.feed import TrackerFeed
from headrace.trainer.record.trackers.process import FOLDER

TRAINER = """
import sys, time
from pathlib import Path
from headrace.trainer.record.trackers.feed import TrackerFeed

feed = TrackerFeed("wandb", Path(sys.argv[1]), 0)
feed.begin({}, {})
for step in (1, 2, 3):
    feed.step(step, {}, {})
time.sleep(600)
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    return FakeWandb(tmp_path, monkeypatch)


def wait_until(condition: Callable[[], object], patience_s: float) -> None:
    wait_for(condition, lambda: True, lambda: "the tracker has not done it", patience_s=patience_s)


def write_steps(feed: TrackerFeed, *steps: int) -> None:
    for step in steps:
        feed.step(step, {"reward/mean": 0.5 * step}, {})


def test_a_tracker_gets_the_steps_and_texts_and_the_result_of_its_run(service: FakeWandb):
    feed = service.open()
    feed.step(1, {"reward/mean": 0.5}, {})
    feed.text(1, "samples", "2 < 3")
    feed.evaluation(0, {"eval/version": 0.0})
    feed.end({"reward_last": 0.5})
    feed.closed(60)
    (opened,) = service.calls("init")
    assert (opened["project"], opened["name"], opened["config"]) == ("headrace", "sums", {"run.steps": 4})
    assert [call["values"] for call in service.calls("log")] == [
        {"reward/mean": 0.5},
        {"samples": "<pre>2 &lt; 3</pre>"},
    ]
    assert service.calls("finish") == [{"exit_code": 0, "summary": {"reward_last": 0.5}}]


def test_a_run_that_continues_has_the_same_id_and_no_step_twice_or_never(service: FakeWandb):
    first = service.open()
    write_steps(first, 1, 2, 3)
    first.end({})
    first.closed(60)
    metrics = service.run_dir / "metrics.jsonl"
    metrics.write_text(
        "".join(json.dumps({"step": step, "time_s": 1, "a": 2, "h": {"1": 2}}) + "\n" for step in range(5))
    )
    second = service.open(past_bytes=metrics.stat().st_size)  # as if steps 4 and 5 had not reached the tracker
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 5, "time_s": 1, "a": 2}) + "\n")
    write_steps(second, 6, 7)
    second.end({})
    second.closed(60)
    assert service.steps == [1, 2, 3, 4, 5, 6, 7]
    assert service.calls("log")[3]["values"] == {"a": 2}
    one, other = service.calls("init")
    assert one["id"] == other["id"] and other["resume"] == "allow"


def test_steps_that_a_run_gives_up_keep_their_first_numbers(service: FakeWandb, capfd: pytest.CaptureFixture[str]):
    for steps in ((1, 2, 3), (2, 3, 4)):
        feed = service.open()
        write_steps(feed, *steps)
        feed.end({})
        feed.closed(60)
    assert service.steps == [1, 2, 3, 4]
    assert (
        capfd.readouterr().out.count("run.report_to=wandb: it keeps the numbers that it has of the steps up to 3") == 1
    )


def test_errors_of_a_tracker_are_said_once_and_counted(service: FakeWandb, capfd: pytest.CaptureFixture[str]):
    service.set(FAILS="log")
    feed = service.open()
    write_steps(feed, 1, 2, 3)
    feed.end({})
    feed.closed(60)
    told = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    assert told == [
        "warning: run.report_to=wandb: OSError: no route to host; training goes on, and further errors are only counted",
        "warning: run.report_to=wandb: 3 of 4 calls failed; metrics.jsonl has all numbers",
    ]


def test_a_tracker_that_cannot_begin_is_said_once(service: FakeWandb, capfd: pytest.CaptureFixture[str]):
    service.set(FAILS="init")
    feed = service.open()
    feed._process.wait(60)
    write_steps(feed, 1, 2)
    feed.end({})
    feed.closed(60)
    told = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    assert told == [
        "warning: run.report_to=wandb: the run goes on without it (OSError: no route to host); metrics.jsonl has all numbers"
    ]


def test_a_tracker_that_hangs_is_left_out_when_memory_is_full_and_ended_at_the_end(
    service: FakeWandb, capfd: pytest.CaptureFixture[str]
):
    service.set(BLOCKS="log")
    feed = service.open(most_bytes=300_000)
    write_steps(feed, 1)
    wait_until(lambda: service.steps == [1], 60)
    started = time.monotonic()
    for step in range(2, 40):
        feed.text(step, "samples", "x" * 100_000)
    assert time.monotonic() - started < 5, "no call waits"
    feed.end({})
    feed.closed(0.2)
    assert feed._process.pid not in children_of(os.getpid())
    told = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    assert len(told) == 3
    assert told[0].endswith("it takes nothing at present; what does not fit into memory is left out")
    assert "has not finished within 0.2 s of the end of the run" in told[1]
    assert "calls were left out" in told[2]


def test_a_package_that_dies_is_told_with_its_exit_code(service: FakeWandb, capfd: pytest.CaptureFixture[str]):
    service.set(BLOCKS="log")
    feed = service.open()
    write_steps(feed, 1)
    wait_until(lambda: service.steps == [1], 60)
    os.kill(feed._process.pid, signal.SIGKILL)
    feed._process.wait(60)
    write_steps(feed, 2)
    feed.end({})
    feed.closed(60)
    assert "warning: run.report_to=wandb: its process has failed with exit code -9\n" in capfd.readouterr().out


def test_a_tracker_ends_its_run_when_the_trainer_is_killed(service: FakeWandb):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(service.run_dir)])
    wait_until(lambda: service.steps == [1, 2, 3], 60)
    trainer.kill()
    trainer.wait(60)
    wait_until(lambda: service.calls("finish") == [{"exit_code": 1, "summary": {}}], 60)
    again = service.open()  # waits until the process before has ended
    write_steps(again, 4)
    again.end({})
    again.closed(60)
    assert service.steps == [1, 2, 3, 4]
    assert json.loads((service.run_dir / FOLDER / "wandb.json").read_text())["step"] == 4


def test_the_variables_of_wandb_come_before_the_names_of_the_run(service: FakeWandb):
    service.set(WANDB_PROJECT="mine", WANDB_NAME="first try", WANDB_RUN_ID="abc")
    feed = service.open()
    feed.end({})
    feed.closed(60)
    (opened,) = service.calls("init")
    assert (opened["project"], opened["name"], opened["id"]) == ("mine", "first try", "abc")
