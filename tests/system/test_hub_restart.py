"""The hub's process is killed or frozen while real processes work: it continues in place, and no other process starts again."""

import os
import signal
import time

import pytest
from support.job import LONG_TAILS, Job, MakeJob, assert_account_adds_up, child_of

from headrace.launch import audit
from headrace.relay.journal.events import Checkpointed, Ending, Event, HubRestarted, Leased, Moved, Published
from headrace.relay.journal.files import read_events


def count(run: Job, kind: type[Event]) -> int:
    journal = run.dir / "journal.jsonl"
    tag = f'{{"event":"{kind.__name__}"'.encode()
    return sum(line.startswith(tag) for line in journal.read_bytes().splitlines()) if journal.exists() else 0


def kill_hub_after(run: Job, kind: type[Event]) -> None:
    """Kill the hub once it has written another event of this kind; returns when its next process has opened the journal."""
    events, restarts = count(run, kind), count(run, HubRestarted)
    run.until(lambda: count(run, kind) > events)
    os.kill(child_of(run, "hub-0"), signal.SIGKILL)
    run.until(lambda: count(run, HubRestarted) > restarts)


def assert_only_the_hub_started_again(run: Job, output: str, times: int, steps: int) -> None:
    assert output.count("is started again") == output.count("hub was ended by SIGKILL and is started again") == times
    assert run.summary()["hub_restarts"] == times
    assert assert_account_adds_up(run)["trained"] == steps * 16
    assert audit.main([str(run.dir)]) == 0


def test_a_hub_that_is_killed_continues_in_place(job: MakeJob):
    run = job(run__steps=30).start()
    for kind in (Leased, Ending):
        kill_hub_after(run, kind)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert_only_the_hub_started_again(run, output, 2, 30)
    assert run.summary()["export"]


@pytest.mark.slow
def test_a_run_whose_hub_was_killed_at_many_moments_is_replayed(job: MakeJob):
    run = job(run__steps=100, run__save_rows="all", checkpoint__every=20).start()
    run.wait_for_step(0)
    moments = (Leased, Published, Checkpointed, Ending)
    for kind in moments:
        kill_hub_after(run, kind)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert_only_the_hub_started_again(run, output, len(moments), 100)
    assert "100 steps replayed, 0 of them differ" in run.replayed()


@pytest.mark.slow
def test_a_hub_that_is_killed_while_trajectories_move_loses_none_of_them(job: MakeJob):
    run = job(run__steps=10_000, **LONG_TAILS).start()
    for _ in range(3):
        kill_hub_after(run, Moved)
    run.wait_for_step(len(run.metrics()) + 5)
    run.signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130, output + run.logs()
    assert output.count("is started again") == output.count("hub was ended by SIGKILL and is started again") == 3
    assert assert_account_adds_up(run)["trained"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("frozen_s", [5.0, 14.0, 30.0])
def test_a_hub_that_is_frozen_continues_when_it_wakes_up(job: MakeJob, frozen_s: float):
    run = job(run__steps=100).start()
    run.wait_for_step(1)
    hub = child_of(run, "hub-0")
    os.kill(hub, signal.SIGSTOP)
    time.sleep(frozen_s)
    os.kill(hub, signal.SIGCONT)
    code, output = run.end()
    assert code == 0, output + run.logs()
    assert_only_the_hub_started_again(run, output, 0, 100)


@pytest.mark.slow
def test_a_hub_that_fails_in_the_same_place_again_and_again_ends_the_run_with_the_cause(job: MakeJob):
    run = job()
    sampler = run.folder / "sampler.py"
    sampler.write_text(
        "class Broken:\n    def sample(self, ready, budget):\n        raise ValueError('nothing fits')\n"
    )
    code, output = run.start(**{"queue.sampler": f"{sampler}:Broken"}).end()
    assert code == 1, output
    assert "ValueError: nothing fits" in run.summary()["error"]
    assert [event for _, event in read_events(run.dir / "journal.jsonl") if isinstance(event, HubRestarted)]
