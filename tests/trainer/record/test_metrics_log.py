"""The metrics of a run are in a file of JSON lines, one object for each step."""

import json
import tracemalloc
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.comm.clock import Clock
from headrace.trainer.record.console import console_line
from headrace.trainer.record.metrics_log import MetricsLog, Value
from headrace.trainer.record.trackers.board import Board
from headrace.trainer.record.trackers.opened import Trackers

METRICS: dict[str, Value] = {
    "reward/mean": 0.5, "response_length/mean": 7.0, "actor/entropy": 0.3, "actor/grad_norm": 1.0,
    "staleness/mean": 1.0, "staleness/hist": {"1": 4}, "perf/throughput": 900.0, "timing_s/step": 0.4,
    "timing_s/wait_data": 0.1,
}  # fmt: skip


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def with_board(run_dir: Path, first_step: int) -> MetricsLog:
    """The log of a run that reports to TensorBoard."""
    board = Board(run_dir / "tensorboard", first_step + 1, deadline_s=60)
    return MetricsLog(run_dir, first_step=first_step, clock=Clock(), open_trackers=lambda _: Trackers([board]))


def test_each_step_is_one_object_with_its_time(tmp_path: Path):
    log = with_board(tmp_path, 0)
    for step in range(3):
        log.write(step, METRICS)
    log.close()
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["staleness/hist"] == {"1": 4} and rows[0]["time_s"] >= 0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert "staleness/hist" not in events.Tags()["scalars"]


def test_a_resumed_run_writes_each_step_once(tmp_path: Path):
    for first, last in ((0, 5), (3, 6)):
        log = MetricsLog(tmp_path, first_step=first, clock=Clock())
        for step in range(first, last):
            log.write(step, METRICS)
        log.close()
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def test_tensorboard_shows_each_step_once_and_at_the_consoles_number_however_often_a_run_is_resumed(tmp_path: Path):
    for first, last in ((0, 5), (3, 6), (6, 8)):
        log = with_board(tmp_path, first)
        # The evaluation of the version that the run continues with comes again, unless its line is there.
        log.write_evaluation({"eval/version": float(first), "eval/test/avg@1": 0.25})
        for step in range(first, last):
            log.write(step, METRICS | {"actor/lr": float(first)})
        log.write_evaluation({"eval/version": float(last), "eval/test/avg@1": 0.5})
        log.write_text(last - 1, "samples", f"of step {last}")
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("actor/lr")]
    assert points == [(1, 0), (2, 0), (3, 0), (4, 3), (5, 3), (6, 3), (7, 6), (8, 6)]
    assert console_line(6, 8, METRICS).startswith("step 7/8")
    evaluated = [(event.step, event.value) for event in events.Scalars("eval/test/avg@1")]
    assert evaluated == [(0, 0.25), (3, 0.25), (6, 0.5), (8, 0.5)]
    assert [event.step for event in events.Tensors("samples")][-2:] == [6, 8]


def test_the_lines_of_a_run_that_goes_on_are_read_one_at_a_time(tmp_path: Path):
    first = MetricsLog(tmp_path, first_step=0, clock=Clock())
    for step in range(500):
        first.write(step, METRICS)
    first.close()
    with first.path.open("a") as file:
        file.write('{"step": 500, "time_s"')  # torn
    log = MetricsLog(tmp_path, first_step=490, clock=Clock())
    tracemalloc.start()
    read = [(line["step"], tracemalloc.get_traced_memory()[0]) for line in log.lines()]
    tracemalloc.stop()
    log.close()
    assert [step for step, _ in read] == [*range(490)]
    assert max(num_bytes for _, num_bytes in read) < 100_000 < log.path.stat().st_size
