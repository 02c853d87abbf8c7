"""The hub decides from messages and journal alone: leases, fencing, hand-outs, deaths, and the account of its decisions."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.hub_scene import Scene
from support.in_memory import MemoryFleet
from support.small_disk import fill, small_disk

from headrace.comm.messages import (
    BusyReport,
    CheckpointRequested,
    CheckpointWritten,
    DrainRequested,
    DropRows,
    Failed,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    RequestRows,
    RowDone,
    RowRef,
    RowsNotFound,
    RowsStreamed,
    StatusReport,
    StatusRequested,
    StepTrained,
    Stop,
    TrainBatch,
    VersionReady,
    encode,
)
from headrace.relay.dataset.order import PromptPool
from headrace.relay.dataset.rows import MAX_ROW_BYTES, JsonLines
from headrace.relay.hub.loop import HubLoop
from headrace.relay.journal import events as ev
from headrace.relay.journal.cutting import cut_after, steps_in
from headrace.relay.journal.files import JournalError, read_events
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import replay


@pytest.fixture
def scene(tmp_path: Path):
    scenes: list[Scene] = []

    def make(**settings: int | bool | str) -> Scene:
        scenes.append(Scene(tmp_path, **settings))  # pyright: ignore[reportArgumentType]
        return scenes[-1]

    yield make
    for each in scenes:
        each.close()


MakeScene = Callable[..., Scene]


def test_a_request_sent_twice_is_answered_the_same(scene: MakeScene):
    s = scene()
    first = s.lease(num_groups=2)
    again = s.lease(num_groups=2)
    assert encode(first) == encode(again)
    assert s.hub.state.account.leased == 4


def test_a_repeated_grant_lacks_the_rows_that_have_come_back_as_another_attempt(scene: MakeScene):
    s = scene()
    (lease,) = s.lease().leases
    row = lease.group.row(0)
    for attempt, source, holder in ((2, "rollout-0", "rollout-1"), (3, "rollout-1", "rollout-0")):
        s.hub.context.commit(ev.Moved(rows=[row], attempts=[attempt], source=source, holder=holder))
    (again,) = s.lease().leases
    assert (again.attempt, again.samples) == (1, [1])


def test_a_grant_of_large_rows_fits_into_a_message(scene: MakeScene):
    s = scene(lead=5, prompt="p" * (MAX_ROW_BYTES - 100))
    leased = [s.lease(request=number, num_groups=5) for number in range(1, 6)]
    assert [len(grant.leases) for grant in leased] == [1] * 5


def test_a_request_beyond_the_length_of_the_queue_waits_until_there_is_room(scene: MakeScene):
    s = scene(lead=1)
    grant = s.lease()
    s.say("rollout-1", LeaseRequest(1, 0, 1))
    assert s.heard("rollout-1") == []
    s.say("actor-0", RequestRows(1, ["train"], 0))
    s.finish(grant)
    assert isinstance(s.heard("rollout-1")[0], LeaseGrant)


def test_rollouts_that_ask_together_share_the_room_in_the_queue(scene: MakeScene):
    s = scene(lead=5)
    s.hub.context.is_leasing = False
    for name in ("rollout-0", "rollout-1"):
        s.say(name, LeaseRequest(1, 0, 5))
    s.hub.context.is_leasing = True
    s.hub.advance()
    grants = [message for name in ("rollout-0", "rollout-1") for message in s.heard(name)]
    assert [len(grant.leases) for grant in grants if isinstance(grant, LeaseGrant)] == [3, 2]


@pytest.mark.parametrize(("queue", "first", "told"), [({"lead": 8}, 0, 8), ({"lead": 99}, 0, 66), ({}, 4, 66)])
def test_a_grant_has_the_window_as_far_as_the_queue_has_room_for_it(
    scene: MakeScene, queue: dict[str, int], first: int, told: int
):
    s = scene(**queue)
    assert s.lease(request=1).window == first, "no step is measured yet"
    s.hub.state.window.limit = 65.7
    assert s.lease(request=2).window == told


def test_rows_that_came_back_are_leased_again_though_the_queue_is_full(scene: MakeScene):
    s = scene(lead=2)
    s.lease(num_groups=2)
    s.hub.on_process_death("rollout-0", "dead")
    assert len(s.lease("rollout-1", num_groups=2).leases) == 2


def test_groups_are_handed_out_once_and_repeated_on_demand(scene: MakeScene):
    s = scene()
    s.finish(s.lease(num_groups=2))
    for _ in range(2):
        s.say("actor-0", RequestRows(1, ["train"], 0))
        (answer,) = s.heard("actor-0")
        assert isinstance(answer, TrainBatch)
        assert (answer.first, answer.total, len(answer.groups)) == (0, 2, 2)
    assert sum(isinstance(event, ev.Handed) for _, event in read_events(s.path)) == 2


def test_groups_that_are_ready_together_are_handed_out_in_pieces(scene: MakeScene):
    """The trainer begins with the first piece and fetches the next one meanwhile."""
    s = scene()
    s.finish(s.lease(num_groups=2))  # 10 tokens each, pieces of 8 micro-batches of a token
    for request_id, received in enumerate((0, 1), start=1):
        s.say("actor-0", RequestRows(request_id, ["train"], 0, received, max_tokens=1))
        (answer,) = s.heard("actor-0")
        assert isinstance(answer, TrainBatch)
        assert (answer.first, answer.total, len(answer.groups)) == (received, 2, 1)


def test_an_answer_never_holds_the_groups_of_two_updates(scene: MakeScene):
    s = scene(per_step=5, updates=2)
    s.finish(s.lease(num_groups=5))
    taken = []
    for request_id, received in enumerate((0, 1, 2, 5), start=1):
        s.say("actor-0", RequestRows(request_id, ["train"], 0, received))
        taken += [len(answer.groups) for answer in s.heard("actor-0") if isinstance(answer, TrainBatch)]
    assert taken == [2, 1, 3]


def test_a_trained_step_drops_its_rows_from_storage(scene: MakeScene):
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


@pytest.mark.parametrize("bound", [4, 1])
def test_where_versions_may_mix_a_begun_row_continues_unless_its_first_tokens_are_too_old(scene: MakeScene, bound: int):
    s = scene(per_step=1, max_age=1, max_staleness=bound, lead=4)
    begun = s.lease().leases[0].group
    first_tokens = RowRef(begun.row(0), 1, ["relay-0#1"], version=0, num_tokens=3, is_partial=True)
    s.say("rollout-0", RowsStreamed([first_tokens]))
    s.hub.on_process_death("rollout-0", "dead")
    for step in range(2):
        s.hub.context.commit(ev.Trained(step=step))
        s.hub.context.commit(ev.Published(version=step + 1, digest="", relay="relay-0"))
    s.say("rollout-1", LeaseRequest(1, 2, 1, can_continue=True))
    (grant,) = s.heard("rollout-1")
    assert isinstance(grant, LeaseGrant)
    assert (grant.version, grant.leases[0].group) == (2, begun)
    assert len(grant.leases[0].partials) == (bound == 4)
    assert s.hub.state.queue.version_of[begun] == (0 if bound == 4 else 2), "its deadline counts from its first tokens"


def test_rows_that_a_dead_rollout_wrote_without_a_report_are_dropped(scene: MakeScene):
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
    assert group.samples(RowStatus.WANTED) == [1], "a row in a lost unit alone has no copy"


def test_a_storage_unit_is_lost_once(scene: MakeScene):
    s = scene()
    for _ in range(2):
        s.hub.on_storage_lost("relay-1#1", "dead")
    assert [type(event) for _, event in read_events(s.path)] == [ev.Opened, ev.UnitLost]


def test_a_restarted_relay_is_idle_for_its_own_time_only(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    MemoryFleet.join_network(s.network, "relay")
    loop.step()
    for report in (BusyReport(0.0, 1.0), BusyReport(60.0, 41.0)):
        s.boxes["relay-0"].send("hub", report)
        loop.step()
    s.hub.fleet_stats.finish_step(s.hub.fleet_stats.snapshot(s.hub.state))
    MemoryFleet.join_network(s.network, "relay")
    loop.step()
    assert s.hub.state.lost_storage_ids == {"relay-0#1"}
    assert "idle/relay" not in s.hub.fleet_stats.snapshot(s.hub.state).metrics, "the dead process is forgotten"
    for report in (BusyReport(0.5, 0.5), BusyReport(1.0, 3.0), BusyReport(2.0, 5.0)):
        s.boxes["relay-0"].send("hub", report)
        loop.step()
        assert 0 <= s.hub.fleet_stats.snapshot(s.hub.state).metrics.get("idle/relay", 0) <= 1
    assert s.hub.fleet_stats.snapshot(s.hub.state).metrics["idle/relay"] == 4.5 / 6


def returned(s: Scene) -> list[str]:
    return [event.reason for _, event in read_events(s.path) if isinstance(event, ev.Returned)]


def looked(loop: HubLoop) -> None:
    """One step, with a look at the fleet."""
    loop._checked_at = -1.0
    assert loop.step() is None


def test_a_process_that_is_dead_gives_its_leases_back_once(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    dead = MemoryFleet.join_network(s.network, "rollout")
    looked(loop)
    old = s.lease()
    dead.crash()
    for _ in range(2):
        looked(loop)
    assert returned(s) == ["incarnation 1 is gone"]
    new = s.lease("rollout-1")
    assert new.leases[0].group == old.leases[0].group


def test_hosts_with_other_files_under_model_path_end_the_run(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    MemoryFleet.join_network(s.network, "actor").announce(config_digest="a", weights_digest="b")
    MemoryFleet.join_network(s.network, "rollout").announce(config_digest="a")
    assert loop.step() is None and not s.hub.context.failure
    MemoryFleet.join_network(s.network, "rollout", 1, host="there").announce(config_digest="a", weights_digest="c")
    loop = HubLoop(s.hub, loop.fleet)
    end = [loop.step() for _ in range(2)][-1]
    assert end is not None and end.status == "failed"
    assert "rollout-1" in end.error and " has other weights than actor-0 on " in end.error


def test_exact_mode_on_machines_with_other_kernels_ends_the_run(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    MemoryFleet.join_network(s.network, "actor").announce(exact_kernels="cpu AVX512, torch 2.13.0")
    MemoryFleet.join_network(s.network, "rollout").announce(exact_kernels="cuda 9.0, torch 2.13.0, triton 3.7.1")
    end = [loop.step() for _ in range(2)][-1]
    assert end is not None and end.status == "failed"
    assert end.error.startswith("generator.exact: rollout-0 on ") and " has other kernels than actor-0 on " in end.error


def test_a_host_that_joins_with_other_files_is_refused_alone(scene: MakeScene, capsys: pytest.CaptureFixture[str]):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    joined = MemoryFleet.join_network(s.network, "rollout", host="there")
    joined.announce(config_digest="b", joined="yes")
    assert loop.step() is None
    MemoryFleet.join_network(s.network, "rollout", 1).announce(config_digest="a")
    s.lease("rollout-0")
    loop = HubLoop(s.hub, loop.fleet)
    assert loop.step() is None and not s.hub.context.failure
    assert returned(s) == ["refused"] and [type(each) for each in s.heard("rollout-0")] == [Stop]
    s.say("rollout-0", LeaseRequest(2, 0, 1))
    assert [type(each) for each in s.heard("rollout-0")] == [Stop]
    assert "rollout-0 is refused: model.path: rollout-0 on " in capsys.readouterr().out


def test_files_under_model_path_that_change_on_a_host_are_a_warning(
    scene: MakeScene, capsys: pytest.CaptureFixture[str]
):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    MemoryFleet.join_network(s.network, "actor").announce(config_digest="a")
    MemoryFleet.join_network(s.network, "rollout").announce(config_digest="a")
    assert loop.step() is None
    MemoryFleet.join_network(s.network, "rollout").announce(config_digest="b")
    assert [loop.step() for _ in range(2)] == [None, None] and not s.hub.context.failure
    assert "rollout-0 on  has another configuration or tokenizer than" in capsys.readouterr().out


def test_a_process_that_is_not_started_again_ends_the_run_with_its_supervisors_words(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    error = "rollout-3 was ended by SIGKILL, after 5 restarts"
    s.network.mailboxes.open("rollout-3").send("hub", Failed(error, 1))
    assert loop.step() == ev.Ending(status="failed", error=error, exit_code=1, gone="rollout-3")


def request(incarnation: int, number: int = 1) -> LeaseRequest:
    return LeaseRequest((incarnation << 32) + number, 0, 1)


def test_leases_of_a_dead_process_whose_request_came_late_return_when_the_next_incarnation_asks(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    rollout = MemoryFleet.join_network(s.network, "rollout")
    looked(loop)
    s.say("rollout-0", request(1))
    rollout.crash()
    looked(loop)
    s.say("rollout-0", request(1, number=2))
    MemoryFleet.join_network(s.network, "rollout")
    looked(loop)
    assert returned(s) == ["incarnation 1 is gone"]
    s.heard("rollout-0")
    s.say("rollout-0", request(2))
    assert returned(s)[1:] == ["incarnation 1 is gone"]
    (grant,) = s.heard("rollout-0")
    assert isinstance(grant, LeaseGrant) and grant.request_id == request(2).request_id
    assert {row.attempt for _, row in s.hub.state.rows(RowStatus.LEASED)} == {grant.leases[0].attempt}


def test_a_request_of_an_earlier_incarnation_is_ignored(scene: MakeScene):
    s = scene(lead=1)
    s.lease("rollout-1")
    s.say("rollout-0", request(2))
    s.say("rollout-0", request(1))
    s.hub.on_process_death("rollout-1", "dead")
    (grant,) = s.heard("rollout-0")
    assert isinstance(grant, LeaseGrant) and grant.request_id == request(2).request_id
    s.say("rollout-0", request(1, number=2))
    assert s.heard("rollout-0") == [] and len(s.hub.state.groups) == 1


def test_a_row_without_a_copy_takes_its_group_out_of_the_step(scene: MakeScene):
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


def test_groups_of_equal_rewards_leave_the_queue_where_the_settings_say_so(scene: MakeScene):
    s = scene(filter_zero_std=True)
    s.finish(s.lease(), reward=lambda sample: 1.0)
    assert s.hub.state.account.filtered == 2
    assert s.hub.state.queued() == []
    (drop,) = s.heard("relay-0")
    assert isinstance(drop, DropRows) and len(drop.keys) == 2


def test_groups_of_different_rewards_stay_in_the_queue(scene: MakeScene):
    s = scene(filter_zero_std=True)
    s.finish(s.lease(), reward=float)
    assert s.hub.state.account.filtered == 0 and len(s.hub.state.queued()) == 1


def test_the_fold_of_the_journal_is_the_state_of_the_hub(scene: MakeScene):
    s = scene()
    s.finish(s.lease(num_groups=2))
    s.say("actor-0", RequestRows(1, ["train"], 0))
    s.say("actor-0", StepTrained(0))
    s.lease(request=2, version=1)
    assert replay(s.path) == s.hub.state


def test_an_unfinished_last_line_is_left_out(scene: MakeScene):
    s = scene()
    s.lease()
    with s.path.open("ab") as file:
        file.write(b'{"event":"Train')
    assert replay(s.path) == s.hub.state


def test_a_damaged_journal_is_named_with_its_line(scene: MakeScene):
    s = scene()
    with s.path.open("ab") as file:
        file.write(b'{"event":"Trained","step":4}\n')
    with pytest.raises(JournalError, match=r"journal.jsonl:2: step 4"):
        replay(s.path)


def test_resuming_cuts_the_events_after_the_steps_of_the_checkpoint_and_keeps_them_in_another_file(scene: MakeScene):
    s = scene(per_step=1)
    s.hub.context.commit(ev.Trained(step=0))
    s.lease()
    s.say("actor-0", CheckpointWritten(1, "run/checkpoints/step_1"))
    assert (s.path.parent / "checkpoints" / "latest").read_text() == "step_1", "once the journal has it"
    s.journal.close()
    cut_after(s.path, 1, 1, rest := s.path.with_name("rest"))
    assert [type(event).__name__ for _, event in read_events(s.path)] == ["Opened", "Trained", "Checkpointed"]
    assert b'"Leased"' in rest.read_bytes()


def test_a_requested_checkpoint_is_asked_of_the_trainer_with_its_next_rows(scene: MakeScene):
    s = scene(per_step=1)
    s.finish(s.lease())
    s.say("actor-0", RequestRows(1, ["train"], step=0))
    for process in ("hub", "relay-0"):  # a signal reaches each of them
        s.say(process, CheckpointRequested())
    s.say("actor-0", RequestRows(2, ["train"], step=0))
    before, after = s.heard("actor-0")
    assert isinstance(before, TrainBatch) and isinstance(after, TrainBatch)
    assert (before.checkpoint_after, after.checkpoint_after) == (-1, 0)
    assert [event.after for _, event in read_events(s.path) if isinstance(event, ev.CheckpointDue)] == [0]


def test_each_epoch_leases_every_prompt_once_in_a_seeded_order(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(7)))
    orders = [[PromptPool(JsonLines(data), shuffle=True, seed=s).group_at(c) for c in range(14)] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(g.prompt for g in orders[0][:7]) == list(range(7))
    assert [g.prompt for g in orders[0][:7]] != [g.prompt for g in orders[0][7:]]


def test_failed_trajectories_are_counted_on_the_console_by_their_reason(
    scene: MakeScene, capsys: pytest.CaptureFixture[str]
):
    s = scene(lead=8)
    rows = [(lease, sample) for lease in s.lease(num_groups=5).leases for sample in lease.samples]
    for lease, sample in rows:
        s.say("rollout-0", RowDone(lease.group.row(sample), lease.attempt, 0, [], 5, None, failure="it returned nan"))
    assert s.hub.state.failures == {"it returned nan": 10}
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["failed trajectories: 1 x it returned nan", "failed trajectories: 10 x it returned nan"]


def test_a_full_disk_leaves_the_pointer_behind_and_the_journal_has_the_checkpoint(tmp_path: Path):
    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        s = Scene(disk, per_step=1)
        s.hub.context.commit(ev.Trained(step=0))
        fill(disk)
        s.say("actor-0", CheckpointWritten(1, "run/checkpoints/step_1"))
        assert steps_in(s.path).checkpoints == {1}
        assert not (disk / "checkpoints" / "latest").exists()
        s.close()


def test_a_drained_rollout_finishes_its_rows_gets_no_more_and_is_stopped(scene: MakeScene):
    s = scene()
    grant = s.lease("rollout-0")
    s.say("ctl-1", DrainRequested("rollout-0"))
    s.say("rollout-0", LeaseRequest(2, 0, 1))
    assert s.heard("rollout-0") == []
    s.finish(grant)
    s.say("rollout-0", LeaseRequest(2, 0, 1))
    assert s.heard("rollout-0") == [Stop("drained")]


def test_a_rollout_that_waits_for_work_is_stopped_as_soon_as_it_is_drained(scene: MakeScene):
    s = scene(lead=1)
    s.lease("rollout-1")
    s.say("rollout-0", LeaseRequest(1, 0, 1))
    s.say("ctl-1", DrainRequested("rollout-0"))
    assert s.heard("rollout-0") == [Stop("drained")]
    s.heard("relay-0")
    s.say("relay-0", DrainRequested("relay-0"))
    assert s.heard("relay-0") == [Stop("drained")]


def test_the_status_has_the_living_members_their_leases_and_the_account(scene: MakeScene):
    s = scene()
    loop = HubLoop(s.hub, MemoryFleet.join_network(s.network, "hub"))
    MemoryFleet.join_network(s.network, "rollout")
    s.lease("rollout-0")
    s.boxes["relay-0"].send("hub", StatusRequested("relay-0"))
    loop.step()
    (status,) = s.heard("relay-0")
    assert isinstance(status, StatusReport)
    assert {member.name: member.leased for member in status.members}["rollout-0"] == 2
    assert status.account["leased"] == 2 and status.account["holds"] is True


def test_a_console_on_a_full_disk_ends_nothing(scene: MakeScene, monkeypatch: pytest.MonkeyPatch):
    s = scene()
    row = s.lease().leases[0].group.row(0)
    console = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    monkeypatch.setattr(sys, "stdout", console)
    s.say("rollout-0", RowDone(row, 1, 0, [], 0, None, failure="the reward failed"))
    with suppress(OSError):
        console.close()
    assert s.hub.state.failures == {"the reward failed": 1}


def test_a_report_by_another_reader_takes_no_row_from_the_trainer_that_has_it(scene: MakeScene):
    s = scene(samples=1)
    s.finish(s.lease(num_groups=2))
    s.say("actor-0", RequestRows(1, ["train"], 0))
    (batch,) = s.heard("actor-0")
    assert isinstance(batch, TrainBatch) and len(batch.groups) == 2
    s.hub.on_storage_lost("relay-0#1", "dead")
    s.say("reference-0", RowsNotFound([batch.groups[0].row(0)], [1], "a batch from before it was frozen"))
    s.say("actor-0", StepTrained(0))
    assert s.hub.state.account.trained == 2 and not s.hub.state.groups
