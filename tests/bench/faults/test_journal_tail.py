"""The journal of a run in progress, and the times of recovery by its events."""

import msgspec
from bench.faults.journal_tail import JournalTail, is_back, named_times, recovery_times

from headrace.comm.messages import GroupId
from headrace.launch.processes.child import describe_exit
from headrace.relay.journal import events as ev

ROW = GroupId(0, 1).row(0)


def ready(unit, t=0.0):
    return ev.RowReady(row=ROW, units=[unit], version=0, num_tokens=3, reward=1.0, t=t)


def test_a_growing_journal_is_read_by_whole_lines_and_from_the_start_after_a_cut(tmp_path):
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert tail.read() == []
    lines = [msgspec.json.encode(ev.Trained(step=step)) + b"\n" for step in range(3)]
    path.write_bytes(lines[0] + lines[1][:5])
    assert tail.read() == [ev.Trained(step=0)]
    path.write_bytes(lines[0] + lines[1] + lines[2])
    assert tail.read() == [ev.Trained(step=1), ev.Trained(step=2)]
    path.write_bytes(lines[0])
    assert tail.read() == [ev.Trained(step=0)]
    assert tail.steps == 4


def test_recovery_counts_from_the_fault_to_the_first_event_of_each_kind():
    events = [
        ev.Received(version=3, digest="", holder="rollout-0", t=9.0),
        ev.Returned(group=GroupId(0, 1), attempt=1, reason="the connection of incarnation 1 ended", t=10.5),
        ev.Returned(group=GroupId(0, 2), attempt=1, reason="incarnation 1 is gone", t=10.75),
        ev.Trained(step=4, t=11.0),
        ev.Received(version=4, digest="", holder="rollout-1", t=12.0),
        ev.Received(version=4, digest="", holder="rollout-0", t=14.0),
    ]
    times = recovery_times("rollout-0", 10.0, events, ())
    assert times == {"rollout-failover": 0.5, "rollout-next-step": 1.0, "rollout-restart": 4.0}
    assert is_back("rollout-0", times) and not is_back("relay-0", times)


def test_leases_are_back_for_the_reason_that_a_supervisor_gives_and_not_for_another_version():
    def returned(reason: str, t: float) -> ev.Event:
        return ev.Returned(group=GroupId(0, 1), attempt=1, reason=reason, t=t)

    events = [returned("rollout-0 switched to another version", 10.1), returned(describe_exit("rollout-0", -9), 10.5)]
    assert recovery_times("rollout-0", 10.0, events, ()) == {"rollout-failover": 0.5}
    assert recovery_times("rollout-0", 10.0, [returned(describe_exit("rollout-0", 1), 11.0)], ()) == {
        "rollout-failover": 1.0
    }


def test_a_relay_is_back_when_a_row_is_ready_in_a_unit_that_was_not_there_before():
    events = [ready("relay-0#1", 10.5), ready("relay-1#2", 11.0), ready("relay-0#2", 13.0)]
    assert recovery_times("relay-0", 10.0, events, {"relay-0#1"}) == {"relay-restart": 3.0}


def test_the_hub_is_back_when_it_opens_the_journal_and_the_trainer_when_it_trains():
    events = [ev.Opened(epoch=2, samples_per_prompt=4, t=11.0), ev.Trained(step=4, t=12.0)]
    assert is_back("hub", recovery_times("hub", 10.0, events, ()))
    assert recovery_times("hub", 10.0, events, ())["hub-restart"] == 1.0
    events = [ready("relay-0#1", 10.5), ev.TrainerRestarted(incarnation=2, t=11.5), ev.Trained(step=4, t=12.0)]
    times = recovery_times("actor-0", 10.0, events, ())
    assert is_back("actor-0", times)
    assert times == {"actor-next-row": 0.5, "actor-restart": 1.5, "actor-next-step": 2.0}


def test_a_step_of_the_dead_trainer_that_the_hub_hears_of_late_is_no_recovery():
    late = ev.Trained(step=4, t=10.1)
    assert not is_back("actor-0", recovery_times("actor-0", 10.0, [late], ()))
    restarted = [late, ev.TrainerRestarted(incarnation=2, t=11.5)]
    assert not is_back("actor-0", recovery_times("actor-0", 10.0, restarted, ()))
    times = recovery_times("actor-0", 10.0, [*restarted, ev.Trained(step=5, t=12.0)], ())
    assert is_back("actor-0", times) and times["actor-next-step"] == 2.0


def test_units_count_from_the_last_opening_since_a_resumed_run_names_them_as_before(tmp_path):
    tail = JournalTail(tmp_path / "journal.jsonl")
    tail.remember_units([ready("relay-0#1"), ready("relay-0#2"), ev.Opened(epoch=2, samples_per_prompt=4)])
    tail.remember_units([ready("relay-0#1")])
    assert tail.units == {"relay-0#1"}


def test_a_restart_of_the_trainer_is_shown_beside_the_cold_start():
    times = {"actor-next-row": 0.5, "actor-next-step": 2.0}
    assert named_times(times, 9.0) == {**times, "cold-start-of-the-run": 9.0}
    assert named_times(times, None) == times
    assert named_times({"relay-restart": 4.0}, 9.0) == {"relay-restart": 4.0}
