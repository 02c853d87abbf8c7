"""The rows that the hub takes back from the disk when a run is resumed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_scene import Restart, Scene

from headrace.comm.messages import (
    CheckpointWritten,
    DropRows,
    LeaseGrant,
    LeaseRequest,
    QueueRestored,
    RequestRows,
    RestoreQueue,
    RowRef,
    RowsStreamed,
    SaveQueue,
    TrainBatch,
)
from headrace.comm.messages.base import GroupId
from headrace.relay.hub import saved_queue
from headrace.relay.hub.saved_queue import PATIENCE_S
from headrace.relay.journal import events as ev
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.replay import replay

UNIT = ["relay-0#1"]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, lead=4)
    yield scene
    scene.close()


def group_at(scene: Scene, position: int) -> GroupId:
    group = scene.hub.prompts.pool.group_at(position)
    assert group is not None
    return group


def finished(group: GroupId, sample: int, attempt: int = 1) -> RowRef:
    return RowRef(group.row(sample), attempt, UNIT, version=0, num_tokens=5, reward=0.5)


def test_with_a_checkpoint_the_rows_of_its_version_and_of_older_ones_are_saved(scene: Scene):
    old = scene.lease(request=1, version=0)
    scene.finish(old)
    new = scene.lease(request=2, version=1)
    scene.finish(new)
    group = scene.lease(request=3, version=0).leases[0].group
    begun = RowRef(group.row(0), 1, UNIT, version=0, num_tokens=3, is_partial=True)
    scene.say("rollout-0", RowsStreamed([begun]))
    scene.say("actor-0", CheckpointWritten(0, "checkpoints/step_0"))
    [order] = [message for message in scene.heard("relay-0") if isinstance(message, SaveQueue)]
    assert (order.step, order.cursor) == (0, 3)
    rows = [RowRef(old.leases[0].group.row(n), 1, UNIT, 0, 5, float(n)) for n in range(2)]
    assert order.rows == [*rows, begun]


def test_rows_beyond_the_most_that_an_order_has_are_counted_on_the_console(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(saved_queue, "MAX_ROWS", 3)
    for request in (1, 2):
        scene.finish(scene.lease(request=request, version=0))
    scene.say("actor-0", CheckpointWritten(0, "checkpoints/step_0"))
    [order] = [message for message in scene.heard("relay-0") if isinstance(message, SaveQueue)]
    assert len(order.rows) == 3
    assert "the queue is saved without 1 of its 4 rows" in capsys.readouterr().out


def test_a_group_leased_after_the_checkpoint_takes_its_place_with_the_rows_that_were_saved(scene: Scene):
    before, group = group_at(scene, 0), group_at(scene, 1)
    begun = RowRef(group.row(1), 1, UNIT, version=0, num_tokens=3, is_partial=True)
    scene.say("relay-0", QueueRestored(0, 3, [finished(group, 0), begun]))
    state = scene.hub.state
    assert (list(state.groups), state.cursor) == ([before, group], 2), "nothing after the last saved row is leased"
    assert [row.status for row in state.groups[group].rows] == [RowStatus.READY, RowStatus.WANTED]
    assert replay(scene.path).in_flight == 4 and account_dict(state)["holds"] is True
    scene.say("rollout-0", LeaseRequest(1, 0, 2, can_continue=True))
    [grant] = scene.heard("rollout-0")
    assert isinstance(grant, LeaseGrant)
    first, second = grant.leases
    assert (first.group, first.samples, first.partials) == (before, [0, 1], ())
    assert (second.group, second.samples) == (group, [1])
    assert second.partials == (begun,)


def test_a_repeated_report_and_rows_that_nothing_needs_change_nothing(scene: Scene):
    group = group_at(scene, 0)
    rows = [finished(group, 0), finished(group, 1)]
    scene.say("relay-0", QueueRestored(0, 1, rows))
    scene.heard("relay-0")
    num_lines = len(scene.path.read_bytes().splitlines())
    scene.say("relay-0", QueueRestored(0, 1, rows))
    assert not scene.heard("relay-0"), "the bytes of a row in the queue stay"
    other = finished(GroupId(7, 0), 0)
    scene.say("relay-0", QueueRestored(0, 1, [other, finished(group, 1, attempt=3)]))
    dropped = [key for message in scene.heard("relay-0") if isinstance(message, DropRows) for key in message.keys]
    assert sorted(dropped) == sorted([other.key, group.row(1).key(3)])
    assert len(scene.path.read_bytes().splitlines()) == num_lines


@pytest.mark.parametrize("how", ["answer", "death", "damage"])
def test_a_file_whose_rows_were_not_all_read_is_not_written_over(
    scene: Scene, how: str, capsys: pytest.CaptureFixture[str]
):
    scene.hub.context.commit(ev.Checkpointed(step=0, path=""))
    scene.hub.saved_queue.restore()
    if how == "death":
        scene.hub.on_process_death("relay-0", "incarnation 1 is gone")
    else:
        answer = QueueRestored(0, 1, [], "not all of it", is_left=how == "answer")
        scene.say("relay-0", answer)
    scene.finish(scene.lease(request=1))
    scene.heard("relay-0")
    number = scene.hub.saved_queue.save()
    assert (
        bool(number) == any(isinstance(message, SaveQueue) for message in scene.heard("relay-0")) == (how == "damage")
    )
    assert ("stays on the disk" in capsys.readouterr().out) == (how != "damage")


def test_a_hub_that_died_before_the_queue_was_read_has_it_read_by_the_next_one(tmp_path: Path):
    scene = Restart(tmp_path)
    scene.hub.context.commit(ev.Checkpointed(step=0, path=""))
    scene.restart()
    assert [message for message in scene.heard("relay-0") if isinstance(message, RestoreQueue)] == [RestoreQueue(0)]
    row = finished(group_at(scene, 0), 0)
    scene.say("rollout-0", LeaseRequest(1 << 32, 0, 1))
    scene.hub.results.drop_needless("relay-0", [row.key])
    assert not scene.heard("relay-0") and not scene.heard("rollout-0"), "its rows are in the units already, and awaited"
    scene.say("relay-0", QueueRestored(0, 1, [row]))
    [grant] = scene.heard("rollout-0")
    assert isinstance(grant, LeaseGrant) and [lease.samples for lease in grant.leases] == [[1]]
    scene.restart()
    assert not any(isinstance(message, RestoreQueue) for message in scene.heard("relay-0")), "it was read"
    scene.close()


@pytest.mark.parametrize("how", ["answer", "death", "deadline"])
def test_leases_wait_until_the_queue_is_read_or_cannot_be(scene: Scene, how: str):
    scene.hub.saved_queue.restore()
    assert any(isinstance(message, RestoreQueue) for message in scene.heard("relay-0"))
    scene.say("rollout-0", LeaseRequest(1, 0, 1))
    assert not scene.heard("rollout-0")
    if how == "answer":
        scene.say("relay-0", QueueRestored(0, 0, [], "step_0 lacks rows-1.safetensors"))
    elif how == "death":
        scene.hub.on_process_death("relay-0", "incarnation 1 is gone")
    else:
        scene.now += PATIENCE_S + 1
        scene.hub.advance()
    [grant] = scene.heard("rollout-0")
    assert isinstance(grant, LeaseGrant) and grant.leases


def test_rows_that_a_lower_bound_of_the_staleness_forbids_are_generated_again(tmp_path: Path):
    scene = Scene(tmp_path, samples=1, per_step=1, max_staleness=1)
    groups = [group_at(scene, position) for position in range(3)]
    scene.say("relay-0", QueueRestored(0, 3, [finished(group, 0) for group in groups]))
    state = scene.hub.state
    assert [state.groups[group].rows[0].status for group in groups] == [RowStatus.READY] * 2 + [RowStatus.WANTED]
    assert [message.keys for message in scene.heard("relay-0") if isinstance(message, DropRows)] == [
        [groups[2].row(0).key(1)]
    ]
    scene.say("actor-0", RequestRows(1, ["train"], step=0))
    (batch,) = scene.heard("actor-0")
    assert isinstance(batch, TrainBatch) and [group.group for group in batch.groups] == groups[:1]
    scene.close()
