"""The next process of the hub: it continues where the journal ends, and catches up with what it has missed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hub_scene import FIRST, Restart

from headrace.comm.messages import (
    CheckpointRequested,
    DrainRequested,
    DropRows,
    HeldRows,
    LeaseGrant,
    LeaseRequest,
    ListStoredRows,
    RequestRows,
    RestoreQueue,
    RowDone,
    StepTrained,
    Stop,
    StoredRows,
    TrainBatch,
)
from headrace.relay.hub.loop import HubLoop
from headrace.relay.hub.shutdown import Shutdown
from headrace.relay.journal import events as ev
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import recover


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Restart]:
    scene = Restart(tmp_path)
    yield scene
    scene.close()


def test_a_restart_changes_nothing_but_its_count_and_the_time_of_the_step(scene: Restart):
    ready, _ = scene.lease(request=FIRST + 1), scene.lease("rollout-1", request=FIRST + 1)
    scene.join("rollout", 1)
    scene.finish(ready)
    before = scene.hub.state
    scene.restart()
    assert scene.hub.state.hub_restarts == 1
    scene.hub.state.hub_restarts, scene.hub.state.window = 0, before.window
    assert scene.hub.state == before


def test_a_grant_that_may_be_lost_is_repeated_without_another_lease(scene: Restart):
    grant = scene.lease(request=FIRST + 1, num_groups=2)
    scene.restart()
    assert scene.heard("rollout-0") == [grant]
    scene.say("rollout-0", LeaseRequest(FIRST + 1, 0, 2))
    assert scene.heard("rollout-0") == [grant]
    assert sum(isinstance(event, ev.Leased) for event in scene.events()) == 2


def test_a_request_that_was_answered_long_ago_gets_no_other_groups(scene: Restart):
    scene.finish(scene.lease(request=FIRST + 1))
    scene.restart()
    scene.say("rollout-0", LeaseRequest(FIRST + 1, 0, 1))
    assert scene.heard("rollout-0")[-1] == LeaseGrant(FIRST + 1, 0, [], window=4)


def test_leases_of_a_process_that_died_meanwhile_come_back(scene: Restart):
    scene.lease("rollout-0", request=FIRST + 1)
    scene.join("rollout", 1)
    scene.lease("rollout-1", request=FIRST + 1)
    scene.join("rollout", 0)  # its second incarnation
    scene.restart()
    holders = [row.holder for _, row in scene.hub.state.rows(RowStatus.LEASED)]
    assert holders == ["rollout-1", "rollout-1"]
    (returned,) = [event for event in scene.events() if isinstance(event, ev.Returned)]
    assert returned.reason == "gone while the hub was restarting"


def test_rows_of_a_storage_unit_that_died_meanwhile_are_wanted_again(scene: Restart):
    scene.finish(scene.lease(request=FIRST + 1))
    scene.join("relay")  # its second incarnation, with an empty unit
    scene.restart()
    assert scene.hub.state.regenerated == 2
    assert scene.hub.state.lost_storage_ids == {"relay-0#1"}


def test_relays_drop_the_rows_that_nothing_needs(scene: Restart):
    ready, leased = scene.lease(request=FIRST + 1), scene.lease(request=FIRST + 2)
    scene.finish(ready)
    scene.restart()
    assert scene.heard("relay-0") == [ListStoredRows()]
    kept = [x.group.row(0).key(x.attempt) for x in (*ready.leases, *leased.leases)]
    needless = [leased.leases[0].group.row(1).key(7), ready.leases[0].group.row(1).key(0), "99.1.0@1"]
    scene.hub.results.drop_needless("relay-0", [*kept, *needless])
    assert scene.heard("relay-0") == [DropRows(needless)]


def test_the_units_of_a_resumed_run_are_not_asked_for_rows_that_nothing_needs(scene: Restart):
    """They have the rows of the saved queue alone, and a partial row of a group that is wanted is needed."""
    scene.hub.context.commit(ev.Checkpointed(step=0, path="step_0"))
    scene.hub.context.commit(ev.Opened(epoch=scene.hub.state.epoch + 1, samples_per_prompt=2))
    for start in ("the first hub of the run", "one that died before it had the answer"):
        HubLoop(scene.hub, scene.join("hub")).recover()
        assert scene.heard("relay-0") == [RestoreQueue(0)], start
        scene.hub.context.commit(ev.HubRestarted())


def test_repeated_reports_change_nothing(scene: Restart):
    grants = [scene.lease(request=FIRST + n) for n in (1, 2)]
    for grant in grants:
        scene.finish(grant)
    scene.say("actor-0", RequestRows(1, ["train"], 0, 0))
    (batch,) = scene.heard("actor-0")
    scene.restart()
    lease = grants[0].leases[0]
    scene.say("rollout-0", RowDone(lease.group.row(0), lease.attempt, 0, ["relay-0#1"], 5, 0.0))
    assert DropRows not in map(type, scene.heard("relay-0"))
    scene.say("actor-0", RequestRows(1, ["train"], 0, 0))
    (again,) = scene.heard("actor-0")
    assert isinstance(batch, TrainBatch) and isinstance(again, TrainBatch)
    assert again.groups == batch.groups
    for _ in range(2):
        scene.say("actor-0", StepTrained(0))
    assert scene.hub.state.account.trained == 4


def test_a_checkpoint_that_was_asked_for_is_still_due(scene: Restart):
    scene.finish(scene.lease(request=FIRST + 1))
    scene.say("hub", CheckpointRequested())
    scene.restart()
    scene.say("actor-0", RequestRows(1, ["train"], 0, 0))
    (batch,) = scene.heard("actor-0")
    assert isinstance(batch, TrainBatch) and batch.checkpoint_after == 0


def test_a_process_that_was_drained_gets_no_more_and_is_stopped(scene: Restart):
    grant = scene.lease(request=FIRST + 1)
    scene.say("ctl-1", DrainRequested("rollout-0"))
    scene.say("ctl-1", DrainRequested("relay-0"))
    scene.restart()
    assert Stop("drained") in scene.heard("relay-0"), "the previous hub may not have sent it"
    assert scene.heard("rollout-0") == [grant]
    scene.finish(grant)
    scene.say("rollout-0", LeaseRequest(FIRST + 2, 0, 1))
    assert scene.heard("rollout-0") == [Stop("drained")]


def test_an_end_that_had_begun_goes_on(scene: Restart):
    end = ev.Ending(status="finished", facts={"export": "here", "time_s": 1.5}, gone="actor-0")
    scene.hub.context.commit(end)
    scene.restart()
    found = HubLoop(scene.hub, scene.join("hub")).step()
    assert found is not None and replace(found, t=end.t) == end


@pytest.mark.parametrize(("incarnation", "num_returned"), [(1, 0), (2, 1)])
def test_at_the_end_the_next_process_of_a_dead_rollout_does_not_answer_for_its_rows(
    scene: Restart, incarnation: int, num_returned: int
):
    """A rollout that dies after `Stop` may be started again; it then reports that it holds nothing."""
    (lease,) = scene.lease(request=FIRST + 1).leases
    rows = [] if num_returned else [lease.group.row(sample) for sample in lease.samples]
    hub = scene.join("hub")
    scene.boxes["rollout-0"].send("hub", HeldRows(rows, [lease.attempt] * len(rows), incarnation))
    scene.boxes["relay-0"].send("hub", StoredRows([], at_end=True))
    summary = Shutdown(scene.hub, hub, 0.5).run(ev.Ending(status="interrupted"))
    assert (summary["accounting"]["in_flight"], summary["accounting"]["holds"]) == (2, True)
    assert sum(isinstance(event, ev.Returned) for event in scene.events()) == num_returned


def test_the_run_that_opened_a_journal_is_found_again(scene: Restart):
    scene.hub.context.commit(ev.Opened(epoch=2, samples_per_prompt=2, run_id="a run"))
    scene.lease(request=FIRST + 1)
    with scene.path.open("ab") as file:
        file.write(b'{"event":"Opened","epoch":3,"run_id":"torn')
    opened = recover(scene.path).opened
    assert (opened.epoch, opened.run_id) == (2, "a run")
