"""The hub decides by letters and journal alone: leases, fencing, hand-outs, and the account of what it decided."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.hub_scene import Scene

from headrace.comm.in_memory import MemoryFleet
from headrace.comm.messages import (
    BusyReport,
    ConnectionLost,
    DropRows,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    RequestRows,
    RowDone,
    RowsNotFound,
    StepTrained,
    TrainBatch,
    VersionReady,
    encode,
)
from headrace.relay.dataset import JsonLines, PromptPool
from headrace.relay.hub.loop import HubLoop
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import JournalError, cut_after_checkpoint, main, read_events, replay
from headrace.relay.journal.state import RowStatus


@pytest.fixture
def scene(tmp_path: Path):
    scenes: list[Scene] = []

    def make(**settings: int | bool) -> Scene:
        scenes.append(Scene(tmp_path, **settings))  # pyright: ignore[reportArgumentType]
        return scenes[-1]

    yield make
    for each in scenes:
        each.hub.context.journal.close()
        each.post.close()


MakeScene = Callable[..., Scene]


def test_a_request_sent_twice_is_answered_the_same(scene: MakeScene):
    s = scene()
    first = s.lease(num_groups=2)
    again = s.lease(num_groups=2)
    assert encode(first) == encode(again)
    assert s.hub.state.account.leased == 4


def test_a_request_beyond_the_capacity_waits_until_there_is_room(scene: MakeScene):
    s = scene(capacity=1)
    grant = s.lease()
    s.say("rollout-1", LeaseRequest(1, 0, 1))
    assert s.heard("rollout-1") == []
    s.say("actor-0", RequestRows(1, ["train"], 0))
    s.finish(grant)
    assert isinstance(s.heard("rollout-1")[0], LeaseGrant)


def test_groups_are_handed_out_once_and_repeated_on_demand(scene: MakeScene):
    s = scene()
    s.finish(s.lease(num_groups=2))
    for _ in range(2):
        s.say("actor-0", RequestRows(1, ["train"], 0))
        (answer,) = s.heard("actor-0")
        assert isinstance(answer, TrainBatch)
        assert (answer.first, answer.total, len(answer.groups)) == (0, 2, 2)
    assert sum(isinstance(event, ev.Handed) for _, event in read_events(s.path)) == 2


def test_what_is_ready_at_once_is_handed_out_in_pieces(scene: MakeScene):
    """The trainer begins with the first piece, and fetches the next meanwhile."""
    s = scene()
    s.finish(s.lease(num_groups=2))  # 10 tokens each, pieces of 8 micro-batches of a token
    for question, received in enumerate((0, 1), start=1):
        s.say("actor-0", RequestRows(question, ["train"], 0, received, max_tokens=1))
        (answer,) = s.heard("actor-0")
        assert isinstance(answer, TrainBatch)
        assert (answer.first, answer.total, len(answer.groups)) == (received, 2, 1)


def test_a_trained_step_frees_the_rows_in_the_units(scene: MakeScene):
    s = scene()
    s.finish(s.lease(num_groups=2))
    s.say("actor-0", RequestRows(1, ["train"], 0))
    s.say("actor-0", StepTrained(0))
    (drop,) = s.heard("relay-0")
    assert isinstance(drop, DropRows) and len(drop.keys) == 4
    assert s.hub.state.account.trained == 4
    s.say("actor-0", StepTrained(0))
    assert s.hub.state.account.trained == 4


def test_the_rows_of_a_dead_rollout_go_to_another_and_its_late_results_are_fenced_off(scene: MakeScene):
    s = scene()
    old = s.lease()
    s.hub.on_process_death("rollout-0", "dead")
    new = s.lease("rollout-1", version=1)
    assert new.leases[0].group == old.leases[0].group
    assert new.leases[0].attempt == 2
    s.finish(old)
    assert s.hub.results.num_fenced == 2
    dropped = [key for message in s.heard("relay-0") if isinstance(message, DropRows) for key in message.keys]
    assert len(dropped) == 2 and all(key.endswith("@1") for key in dropped)
    assert not s.hub.state.groups[old.leases[0].group].is_complete
    s.finish(new, "rollout-1")
    assert s.hub.state.groups[old.leases[0].group].is_complete


def test_the_bytes_of_a_dead_rollout_that_told_nobody_are_dropped(scene: MakeScene):
    s = scene()
    s.say("relay-0/weights", VersionReady(0, "digest"))
    grant = s.lease()
    s.hub.on_process_death("rollout-0", "dead")
    (drop,) = s.heard("relay-0")
    group = grant.leases[0].group
    assert drop == DropRows([f"{group}.0@1", f"{group}.1@1"])


def test_rows_whose_last_copy_died_with_a_relay_are_generated_again_and_counted(scene: MakeScene):
    s = scene()
    (lease,) = (grant := s.lease()).leases
    for sample, units in ((0, ["relay-0#1", "relay-1#1"]), (1, ["relay-1#1"])):
        row = lease.group.row(sample)
        s.say("rollout-0", RowDone(row, 1, grant.version, units, 5, float(sample)))
    s.hub.on_storage_lost("relay-1#1", "dead")
    group = s.hub.state.groups[lease.group]
    assert group.rows[0].storage_ids == ["relay-0#1"] and group.samples(RowStatus.WANTED) == [1]
    assert s.hub.state.regenerated == 1 and s.hub.state.is_balanced
    again = s.lease(request=2)
    assert (again.leases[0].samples, again.leases[0].attempt) == ([1], 2)
    s.say("rollout-0", RowDone(lease.group.row(1), 2, 0, ["relay-1#1"], 5, 1.0))
    assert group.samples(RowStatus.WANTED) == [1], "what is said to lie in a lost unit lies nowhere"


def test_a_storage_unit_is_lost_once(scene: MakeScene):
    s = scene()
    for _ in range(2):
        s.hub.on_storage_lost("relay-1#1", "dead")
    assert [type(event) for _, event in read_events(s.path)] == [ev.Opened, ev.UnitLost]


def relay_load(busy_s: float, idle_s: float) -> BusyReport:
    return BusyReport(busy_s, idle_s)


def test_a_relay_that_was_started_again_is_idle_for_its_own_time_only(scene: MakeScene):
    s = scene()
    watch = HubLoop(s.hub, MemoryFleet.join_network(s.town, "hub"))
    MemoryFleet.join_network(s.town, "relay")
    watch.step()
    for report in (relay_load(0.0, 1.0), relay_load(60.0, 41.0)):
        s.boxes["relay-0"].send("hub", report)
        watch.step()
    s.hub.fleet_stats.snapshot(s.hub.state)
    s.hub.fleet_stats.finish_step()
    MemoryFleet.join_network(s.town, "relay")
    watch.step()
    assert s.hub.state.lost_storage_ids == {"relay-0#1"}
    assert "idle/relay" not in s.hub.fleet_stats.snapshot(s.hub.state), "the dead process is forgotten"
    for report in (relay_load(0.5, 0.5), relay_load(1.0, 3.0), relay_load(2.0, 5.0)):
        s.boxes["relay-0"].send("hub", report)
        watch.step()
        assert 0 <= s.hub.fleet_stats.snapshot(s.hub.state).get("idle/relay", 0) <= 1
    assert s.hub.fleet_stats.snapshot(s.hub.state)["idle/relay"] == 4.5 / 6


def returned(s: Scene) -> list[str]:
    return [event.reason for _, event in read_events(s.path) if isinstance(event, ev.Returned)]


def test_a_process_whose_connection_is_lost_gives_its_leases_back_once(scene: MakeScene):
    s = scene()
    watch, dead = HubLoop(s.hub, MemoryFleet.join_network(s.town, "hub")), MemoryFleet.join_network(s.town, "rollout")
    old = s.lease()
    for _ in range(2):  # two relays may see it
        s.boxes["relay-0"].send("hub", ConnectionLost("rollout-0", 1))
        watch.step()
    assert returned(s) == ["the connection of incarnation 1 ended"]
    new = s.lease("rollout-1")
    assert new.leases[0].group == old.leases[0].group
    dead.crash()
    watch.step()
    assert len(returned(s)) == 1, "the heartbeat that stops later is of no consequence"


def test_the_next_incarnation_keeps_its_leases(scene: MakeScene):
    s = scene()
    watch = HubLoop(s.hub, MemoryFleet.join_network(s.town, "hub"))
    MemoryFleet.join_network(s.town, "rollout")
    s.boxes["relay-0"].send("hub", ConnectionLost("rollout-0", 1))
    watch.step()
    s.lease(request=1)
    MemoryFleet.join_network(s.town, "rollout")
    watch.step()
    s.boxes["relay-0"].send("hub", ConnectionLost("rollout-0", 1))
    watch.step()
    assert returned(s) == []
    s.boxes["relay-0"].send("hub", ConnectionLost("rollout-0", 2))
    watch.step()
    assert len(returned(s)) == 1


def test_a_process_that_was_reported_in_error_still_dies_when_its_heartbeat_stops(scene: MakeScene):
    s = scene()
    watch, alive = HubLoop(s.hub, MemoryFleet.join_network(s.town, "hub")), MemoryFleet.join_network(s.town, "rollout")
    s.boxes["relay-0"].send("hub", ConnectionLost("rollout-0", 1))
    watch.step()
    s.lease()
    watch.step()
    assert returned(s) == []
    alive.crash()
    watch.step()
    assert returned(s) == ["incarnation 1 is gone"]


def test_a_process_that_left_or_never_joined_cannot_lose_its_connection(scene: MakeScene):
    s = scene()
    watch, left = HubLoop(s.hub, MemoryFleet.join_network(s.town, "hub")), MemoryFleet.join_network(s.town, "rollout")
    left.leave()
    for name in ("rollout-0", "rollout-7"):
        s.boxes["relay-0"].send("hub", ConnectionLost(name, 1))
        assert watch.step() is None
    assert returned(s) == []


def test_a_row_that_its_reader_finds_nowhere_takes_its_group_out_of_the_step(scene: MakeScene):
    s = scene()
    grant = s.lease(num_groups=2)
    s.finish(grant)
    s.say("actor-0", RequestRows(1, ["train"], 0))
    lost = grant.leases[1].group
    gone = RowsNotFound([lost.row(0)] * 1, [1], "no copy")
    s.say("actor-0", gone)
    s.say("actor-0", gone)
    assert lost not in s.hub.state.in_training and s.hub.state.groups[lost].samples(RowStatus.WANTED) == [0]
    assert s.hub.state.regenerated == 1 and s.hub.state.is_balanced
    assert replay(s.path) == s.hub.state


def test_leases_given_back_are_leased_again_first(scene: MakeScene):
    s = scene()
    grant = s.lease()
    s.say("rollout-0", LeaseReturn([grant.leases[0].group], [1]))
    assert s.lease("rollout-1").leases[0].group == grant.leases[0].group


def test_groups_without_signal_are_replaced_when_asked_for(scene: MakeScene):
    s = scene(filter_zero_std=True)
    s.finish(s.lease(), reward=lambda sample: 1.0)
    assert s.hub.state.account.filtered == 2
    assert s.hub.state.queued() == []
    (drop,) = s.heard("relay-0")
    assert isinstance(drop, DropRows) and len(drop.keys) == 2


def test_the_journal_tells_the_same_state(scene: MakeScene):
    s = scene()
    s.finish(s.lease(num_groups=2))
    s.say("actor-0", RequestRows(1, ["train"], 0))
    s.say("actor-0", StepTrained(0))
    s.lease(request=2, version=1)
    assert replay(s.path) == s.hub.state


def test_a_line_that_the_writer_did_not_finish_is_left_out(scene: MakeScene):
    s = scene()
    s.lease()
    with s.path.open("ab") as file:
        file.write(b'{"event":"Train')
    assert replay(s.path) == s.hub.state


def test_a_damaged_journal_is_named_with_its_line(scene: MakeScene, capsys: pytest.CaptureFixture[str]):
    s = scene()
    with s.path.open("ab") as file:
        file.write(b'{"event":"Trained","step":4}\n')
    with pytest.raises(JournalError, match=r"journal.jsonl:2: step 4"):
        replay(s.path)
    assert main([str(s.path.parent)]) == 1
    assert "journal.jsonl:2" in capsys.readouterr().err


def test_resuming_cuts_what_came_after_the_checkpoint_and_keeps_it_beside(scene: MakeScene):
    s = scene()
    s.hub.context.commit(ev.Checkpointed(step=0, path="x"))
    s.lease()
    cut_after_checkpoint(s.path, 0)
    assert len(list(read_events(s.path))) == 2
    assert len(list(s.path.parent.glob("journal.jsonl.discarded-*"))) == 1


def test_the_account_of_a_run_is_printed(scene: MakeScene, capsys: pytest.CaptureFixture[str]):
    s = scene()
    s.finish(s.lease())
    assert main([str(s.path.parent)]) == 0
    assert "leased=2 trained=0 evicted=0 filtered=0 failed=0 in_flight=2 holds=True" in capsys.readouterr().out


def test_the_data_is_dealt_out_once_per_epoch_in_a_seeded_order(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(7)))
    deals = [[PromptPool(JsonLines(data), shuffle=True, seed=s).group_at(c) for c in range(14)] for s in (1, 1, 2)]
    assert deals[0] == deals[1] != deals[2]
    assert sorted(g.prompt for g in deals[0][:7]) == list(range(7))
    assert [g.prompt for g in deals[0][:7]] != [g.prompt for g in deals[0][7:]]
