"""The faults that the benches find in the folder of a run."""

import msgspec
import numpy as np
import pytest
from bench.faults.checks import problems_of_journal
from bench.faults.growth import growth_rows
from bench.faults.job import FaultyJob
from bench.faults.processes import Usage
from bench.faults.striker import Fault

from headrace.comm.errors import WaitTimeout
from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.launch.placement import RESTARTABLE
from headrace.relay.journal import events as ev
from headrace.relay.queue.batch import Batch
from headrace.trainer.step_log import StepLog


def write_journal(run_dir, num_steps):
    events = [ev.Opened(epoch=1, samples_per_prompt=1), ev.Published(version=0, digest="", relay="relay-0")]
    for step in range(num_steps):
        group = GroupId(0, step)
        events += [
            ev.Leased(group=group, samples=[0], attempt=1, version=0, holder="rollout-0"),
            ev.RowReady(row=group.row(0), units=["relay-0#1"], version=0, num_tokens=3, reward=1.0),
            ev.Handed(step=step, groups=[group]),
            ev.Trained(step=step),
        ]
    (run_dir / "journal.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def write_rows(run_dir, prompts):
    log = StepLog(run_dir)
    for step, prompt in enumerate(prompts):
        group = GroupRef(GroupId(0, prompt), [0], [1 + step], [["relay-0#1"]], [0], [3], [1.0])
        batch = TrainBatch(step=step, first=0, total=1, groups=[group], metrics={})
        (row,) = batch.rows()
        log.add(Batch(batch, [[row]], {row.key: {"reward": np.ones(1, np.float32)}}))
        log.write(step)


def test_a_row_that_the_trainer_saved_in_two_steps_is_found(tmp_path):
    write_journal(tmp_path, 3)
    write_rows(tmp_path, [0, 1, 0])
    assert problems_of_journal(tmp_path) == ["1 rows were trained twice: 0.0.0"]


def test_steps_that_a_resumed_run_has_not_repeated_yet_do_not_count(tmp_path):
    write_journal(tmp_path, 2)
    write_rows(tmp_path, [0, 1, 0])
    assert problems_of_journal(tmp_path) == []


def test_an_illegal_line_of_the_journal_is_found(tmp_path):
    write_journal(tmp_path, 1)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(ev.Trained(step=5)) + b"\n")
    (problem,) = problems_of_journal(tmp_path)
    assert "does not verify" in problem and "journal.jsonl:7" in problem


@pytest.mark.parametrize("role", ["rollout", "relay", "hub", "actor"])
def test_the_placement_says_which_deaths_end_a_run(role):
    name = "hub" if role == "hub" else f"{role}-0"
    assert Fault((name,)).ends_the_run == (role not in RESTARTABLE)
    assert not Fault((name,), frozen_s=5.0).ends_the_run
    assert Fault((name, "host of rollout-0")).ends_the_run


def test_a_run_that_ends_before_its_first_step_is_an_error_at_once(tmp_path):
    job = FaultyJob(tmp_path)  # it has no policy and no data
    with pytest.raises(WaitTimeout, match="ended before its first step"):
        job.start()


def test_growth_is_the_last_third_over_the_first_and_none_without_open_files():
    samples = [Usage(100.0, 0, 4)] * 3 + [Usage(110.0, 0, 4)] * 3 + [Usage(150.0, 0, 2)] * 3
    rows = growth_rows("reward", samples)
    assert [(row.name, row.value, row.ratio) for row in rows] == [
        ("reward megabytes", 150.0, 1.5),
        ("reward files", 0.0, 0.0),
        ("reward threads", 2.0, 0.5),
    ]
