"""A run that has finished leaves its results, and no traces and empty logs unless it was asked to."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.comm.clock import Clock
from headrace.comm.trace import Trace
from headrace.launch.report.summary import print_summary
from headrace.trainer.record.trackers.board import Board

FINISHED: dict[str, Any] = {"status": "finished", "exit_code": 0}
KEPT = {"config.yaml", "journal.jsonl", "summary.json", "logs"}


def run_folder(folder: Path, summary: dict[str, Any]) -> Path:
    """The folder of a run whose hub has just written the summary."""
    trace = Trace(folder, "actor-0", Clock())
    trace.enter("train", step=0)
    trace.close()
    (folder / "logs").mkdir()
    (folder / "logs" / "hub.log").write_text("")
    (folder / "logs" / "store.log").write_text("store\n")
    for name in ("config.yaml", "journal.jsonl", "journal.jsonl.discarded-1"):
        (folder / name).write_text("{}\n")
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_run_leaves_no_traces_no_empty_logs_and_no_rest_of_a_journal(tmp_path: Path):
    print_summary(run_folder(tmp_path, FINISHED))
    assert names(tmp_path) == KEPT
    assert names(tmp_path / "logs") == {"store.log"}


def test_a_run_that_was_asked_for_its_trace_keeps_it_with_a_timeline(tmp_path: Path):
    print_summary(run_folder(tmp_path, FINISHED), with_trace=True)
    assert names(tmp_path) == KEPT | {"trace", "trace.json"}
    assert "train" in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("end", [{"status": "failed", "exit_code": 1}, {"status": "interrupted", "exit_code": 0}])
def test_a_run_that_did_not_finish_keeps_all_files_which_may_show_the_reason(end: dict[str, Any], tmp_path: Path):
    print_summary(run_folder(tmp_path, end))
    assert names(tmp_path) == KEPT | {"trace", "trace.json", "journal.jsonl.discarded-1"}
    assert names(tmp_path / "logs") == {"hub.log", "store.log"}


@pytest.mark.parametrize("other", ["metrics.jsonl", "config.yaml"])
def test_the_journal_of_steps_that_were_given_up_or_of_another_run_stays(other: str, tmp_path: Path):
    run_folder(tmp_path, FINISHED)
    (tmp_path / f"{other}.discarded-1").write_text("{}\n")
    print_summary(tmp_path)
    assert "journal.jsonl.discarded-1" in names(tmp_path)


@pytest.mark.parametrize("with_trace", [False, True])
def test_tensorboard_gets_the_timeline_as_an_image_at_the_last_step(with_trace: bool, tmp_path: Path):
    run_folder(tmp_path, FINISHED)
    Board(tmp_path / "tensorboard", 0, deadline_s=60).end(None)
    lines = [json.dumps({"step": step, "time_s": 1.0}) for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "ti')
    print_summary(tmp_path, with_trace=with_trace)
    (event,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("timeline")
    width, height, png = event.tensor_proto.string_val
    assert event.step == 3 and Image.open(io.BytesIO(png)).size == (int(width), int(height))


def test_files_that_no_process_of_the_run_has_written_stay(tmp_path: Path):
    run_folder(tmp_path, FINISHED)
    mine = [tmp_path / "trace" / "mine.txt", tmp_path / "trace" / "mine.jsonl", tmp_path / "logs" / "mine.log"]
    for path in mine:
        path.touch()
    print_summary(tmp_path)
    assert all(path.exists() for path in mine)
    assert names(tmp_path / "trace") == {"mine.txt", "mine.jsonl"} and names(tmp_path / "logs") == {
        "store.log",
        "mine.log",
    }


def test_a_folder_without_logs_has_no_folder_of_logs(tmp_path: Path):
    run_folder(tmp_path, FINISHED)
    (tmp_path / "logs" / "store.log").unlink()
    print_summary(tmp_path)
    assert "logs" not in names(tmp_path)
