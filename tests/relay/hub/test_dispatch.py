"""Each task gets a row once; rows of a dead consumer come back; groups that are stale or failed leave the queue and are counted."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hub_scene import Scene

from headrace.comm.errors import SettingError
from headrace.comm.messages import (
    ActorFailed,
    ColumnsAdded,
    DropRows,
    LeaseGrant,
    NoRowsYet,
    RequestRows,
    RestartPoint,
    RowBatch,
    RowDone,
    RowId,
    StepTrained,
    TrainBatch,
    TrainerStarted,
)
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import AlgorithmSettings, QueueSettings, TaskSettings
from headrace.relay.hub.hub import MAX_RESTARTS_IN_STEP
from headrace.relay.journal.replay import replay
from headrace.relay.queue.tasks import Task, pipeline

MakeScene = Callable[..., Scene]
TASKS = pipeline(QueueSettings(), AlgorithmSettings(kl_coef=0.1))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[MakeScene]:
    scenes: list[Scene] = []

    def make(**settings: object) -> Scene:
        scenes.append(Scene(tmp_path, **settings))  # pyright: ignore[reportArgumentType]
        s = scenes[-1]
        s.boxes |= {name: s.mailboxes.open(name) for name in ("reference-0", "reference-1")}
        return s

    yield make
    for each in scenes:
        each.close()


def take(
    s: Scene, consumer: str, request_id: int = 1, open_batches: tuple[int, ...] = (), tokens: int = 100
) -> RowBatch | None:
    held = tuple(("reference", number) for number in open_batches)
    s.say(consumer, RequestRows(request_id, ["reference"], open_batches=held, max_tokens=tokens))
    (answer,) = s.heard(consumer) or [None]
    assert answer is None or isinstance(answer, RowBatch)
    return answer


def done(batch: RowBatch) -> ColumnsAdded:
    rows = [group.row(i) for group in batch.groups for i in range(len(group.samples))]
    units = [group.storage_ids[i] for group in batch.groups for i in range(len(group.samples))]
    return ColumnsAdded("reference", batch.batch_id, ["ref_logprobs"], rows, units)


def rows_of(batch: RowBatch) -> set[RowId]:
    return {group.row(i) for group in batch.groups for i in range(len(group.samples))}


def ready(s: Scene, num_groups: int = 2) -> LeaseGrant:
    grant = s.lease(num_groups=num_groups)
    s.finish(grant)
    return grant


def train(s: Scene) -> list[TrainBatch]:
    s.say("actor-0", RequestRows(1, ["train"], s.hub.state.step))
    return [message for message in s.heard("actor-0") if isinstance(message, TrainBatch)]


def test_training_waits_for_the_columns_that_its_loss_needs(scene: MakeScene):
    s = scene(tasks=TASKS)
    grant = ready(s)
    assert train(s) == []
    queue = s.hub.state.queue
    assert (len(queue.at_tasks), len(queue.ready)) == (2, 0)
    first = take(s, "reference-0", tokens=10)
    assert first is not None and len(rows_of(first)) == 2
    assert [group.group for group in first.groups] == [grant.leases[0].group], "the oldest rows go first"
    s.say("reference-0", done(first))
    assert (len(queue.at_tasks), len(queue.ready)) == (1, 0), "one is trained, which the hub handed out at once"
    second = take(s, "reference-0", request_id=2)
    assert second is not None and not rows_of(second) & rows_of(first)
    s.say("reference-0", done(second))
    assert not queue.at_tasks
    handed = [message for message in s.heard("actor-0") if isinstance(message, TrainBatch)]
    assert sum(len(batch.groups) for batch in handed) >= 1
    assert replay(s.path) == s.hub.state


@pytest.mark.parametrize("step", [0, 1])
def test_an_overdue_request_is_answered_without_rows_and_any_other_waits_for_some(scene: MakeScene, step: int):
    """The trainer asks for groups of step 1 while it trains those of step 0."""
    s = scene()
    s.say("actor-0", RequestRows(1, ["train"], step))
    assert not s.heard("actor-0")
    s.say("actor-0", RequestRows(1, ["train"], step, is_overdue=True))
    assert s.heard("actor-0") == [NoRowsYet(1)]
    s.say("actor-0", RequestRows(2, ["train"], step))
    assert not s.heard("actor-0")


def test_an_overdue_request_gets_the_rows_that_are_ready(scene: MakeScene):
    s = scene()
    ready(s)
    s.say("actor-0", RequestRows(1, ["train"], 0, is_overdue=True))
    (answer,) = s.heard("actor-0")
    assert isinstance(answer, TrainBatch)


def test_two_consumers_share_the_rows_and_no_row_goes_to_both(scene: MakeScene):
    s = scene(tasks=TASKS)
    s.say("reference-0", RequestRows(1, ["reference"]))
    s.say("reference-1", RequestRows(1, ["reference"]))
    ready(s)
    answers = [m for name in ("reference-0", "reference-1") for m in s.heard(name) if isinstance(m, RowBatch)]
    assert len(answers) == 2 and not rows_of(answers[0]) & rows_of(answers[1])


def test_a_task_gets_no_row_again_that_it_has_finished(scene: MakeScene):
    s = scene(tasks=TASKS)
    ready(s)
    batch = take(s, "reference-0")
    assert batch is not None and len(rows_of(batch)) == 4
    s.say("reference-0", done(batch))
    assert take(s, "reference-0", request_id=2) is None


def test_of_a_rows_copies_those_with_the_new_columns_stay_and_the_others_are_dropped(scene: MakeScene):
    s = scene(tasks=TASKS, samples=1)
    (lease,) = s.lease().leases
    row = lease.group.row(0)
    s.say("rollout-0", RowDone(row, lease.attempt, 0, ["relay-0#1", "relay-1#1"], 5, 1.0))
    batch = take(s, "reference-0")
    assert batch is not None
    s.say("reference-0", ColumnsAdded("reference", batch.batch_id, ["ref_logprobs"], [row], [["relay-1#1"]]))
    assert s.hub.state.groups[lease.group].rows[0].storage_ids == ["relay-1#1"]
    assert s.heard("relay-0") == [DropRows([row.key(lease.attempt)])]


def test_only_the_consumer_of_a_batch_ends_it(scene: MakeScene):
    s = scene(tasks=TASKS)
    ready(s)
    batch = take(s, "reference-0")
    assert batch is not None
    s.say("reference-1", done(batch))
    assert s.hub.state.tasks["reference"].consumed == 0
    s.say("reference-0", done(batch))
    assert s.hub.state.tasks["reference"].consumed == len(rows_of(batch))


def test_the_rows_of_a_dead_consumer_go_to_another_and_its_later_reports_are_ignored(scene: MakeScene):
    s = scene(tasks=TASKS)
    ready(s)
    first = take(s, "reference-0")
    assert first is not None
    s.hub.on_process_death("reference-0", "dead")
    second = take(s, "reference-1")
    assert second is not None and rows_of(second) >= rows_of(first)
    s.say("reference-0", done(first))
    assert s.hub.state.tasks["reference"].consumed == 0
    s.say("reference-1", done(second))
    s.say("reference-1", done(second))
    record = s.hub.state.tasks["reference"]
    assert record.consumed == len(rows_of(second)) and record.returned == len(rows_of(first)) and record.is_balanced


def test_a_batch_whose_message_was_lost_comes_again_and_one_that_is_held_does_not(scene: MakeScene):
    s = scene(tasks=TASKS)
    ready(s)
    first = take(s, "reference-0", tokens=5)
    again = take(s, "reference-0", request_id=2, tokens=5)
    assert first is not None and again is not None and again.batch_id == first.batch_id
    other = take(s, "reference-0", request_id=3, open_batches=(first.batch_id,), tokens=5)
    assert other is not None and other.batch_id != first.batch_id


def test_columns_that_a_consumer_adds_to_a_row_outside_the_queue_are_dropped(scene: MakeScene):
    s = scene(tasks=TASKS, filter_zero_std=True)
    (lease,) = (grant := s.lease()).leases
    row = lease.group.row(0)
    s.say("rollout-0", RowDone(row, 1, grant.version, ["relay-0#1"], 5, 1.0))
    batch = take(s, "reference-0")
    assert batch is not None
    s.say("rollout-0", RowDone(row.group.row(1), 1, grant.version, ["relay-0#1"], 5, 1.0))
    assert s.hub.state.account.filtered == 2
    s.heard("relay-0")
    s.say("reference-0", done(batch))
    assert s.heard("relay-0") == [DropRows([row.key(1)])]
    record = s.hub.state.tasks["reference"]
    assert (record.dropped, record.consumed, record.is_balanced) == (1, 0, True)


def test_a_failed_row_leaves_the_others_of_its_group_alone(scene: MakeScene):
    s = scene()
    (lease,) = (grant := s.lease()).leases
    rows = [lease.group.row(sample) for sample in range(2)]
    s.say("rollout-0", RowDone(rows[0], 1, grant.version, ["relay-0#1"], 5, 1.0))
    s.say("rollout-0", RowDone(rows[1], 1, grant.version, [], 0, None, failure="no reward"))
    account = s.hub.state.account
    assert (account.failed, account.evicted, s.hub.state.is_balanced) == (1, 0, True)
    assert len(train(s)) == 1


def test_a_users_sampler_chooses_among_the_complete_groups(scene: MakeScene, tmp_path: Path):
    (tmp_path / "newest.py").write_text(
        "class Newest:\n    def sample(self, items, room):\n        return sorted(items, key=lambda i: -i.lease_order)[:1]\n"
    )
    s = scene(sampler=f"{tmp_path}/newest.py:Newest", per_step=1)
    grant = ready(s)
    (batch,) = train(s)
    assert batch.groups[0].group == grant.leases[-1].group


@pytest.mark.parametrize(
    ("name", "needs", "yields", "problem"),
    [
        ("reference", (), ("x",), "already"),
        ("a", ("nonsense",), ("x",), "nonsense"),
        ("a", (), ("reward",), "reward"),
        ("a", (), (), "no column"),
        ("a", (), ("x/y",), "a column's name has no '/'"),
        ("not a name", (), ("x",), "name"),
    ],
)
def test_a_task_that_is_not_possible_is_refused_with_its_setting(name, needs, yields, problem: str):
    task = TaskSettings(name=name, function="f.py:f", needs=needs, yields=yields)
    with pytest.raises(SettingError, match=rf"queue\.tasks: .*{problem}"):
        pipeline(QueueSettings(tasks=(task,)), AlgorithmSettings(kl_coef=0.1))


def test_a_trainer_that_starts_again_gets_the_groups_of_its_step_in_the_same_answers(scene: MakeScene):
    s = scene(per_step=3)
    ready(s, num_groups=3)

    def answers() -> list[list[GroupRef]]:
        """A group has 10 tokens, and an answer takes 2 micro-batches of 8."""
        found: list[TrainBatch] = []
        for _ in range(2):
            received = sum(len(batch.groups) for batch in found)
            s.say("actor-0", RequestRows(received + 1, ["train"], 0, received, max_tokens=8))
            found += [message for message in s.heard("actor-0") if isinstance(message, TrainBatch)]
        return [batch.groups for batch in found]

    first = answers()
    for _ in range(2):  # the question is repeated
        s.say("actor-0", TrainerStarted(2))
    assert s.heard("actor-0") == [RestartPoint(2, 0), RestartPoint(2, 0)]
    assert s.hub.state.trainer_restarts == 1
    assert answers() == first and [len(groups) for groups in first] == [2, 1]
    assert replay(s.path) == s.hub.state


def hand_outs(s: Scene, *, received: int = 0, least_tokens: int = 16) -> list[int]:
    """Groups of each answer to a trainer of several ranks. A group has 10 tokens."""
    s.say("actor-0", RequestRows(received + 1, ["train"], 0, received, max_tokens=16, least_tokens=least_tokens))
    return [len(message.groups) for message in s.heard("actor-0") if isinstance(message, TrainBatch)]


def test_several_ranks_get_no_groups_until_there_is_a_micro_batch_for_each_of_them(scene: MakeScene):
    s = scene(per_step=4)
    grant = s.lease(num_groups=4)
    s.finish(grant.__class__(grant.request_id, grant.version, grant.leases[:1]))
    assert hand_outs(s) == [], "ten tokens of sixteen"
    assert replay(s.path) == s.hub.state
    s.finish(grant.__class__(grant.request_id, grant.version, grant.leases[1:2]))
    assert [len(m.groups) for m in s.heard("actor-0") if isinstance(m, TrainBatch)] == [2]


def test_one_rank_begins_with_the_first_group(scene: MakeScene):
    s = scene(per_step=4)
    grant = s.lease(num_groups=4)
    s.finish(grant.__class__(grant.request_id, grant.version, grant.leases[:1]))
    assert hand_outs(s, least_tokens=0) == [1]


def test_the_rest_of_a_step_is_enough_for_several_ranks(scene: MakeScene):
    s = scene(per_step=3)
    grant = s.lease(num_groups=3)
    s.finish(grant.__class__(grant.request_id, grant.version, grant.leases[:2]))
    assert hand_outs(s) == [2]
    s.finish(grant.__class__(grant.request_id, grant.version, grant.leases[2:]))
    assert hand_outs(s, received=2) == [1]


def test_several_ranks_get_what_there_is_where_no_other_group_is_under_way(scene: MakeScene):
    s = scene(per_step=4)
    ready(s, num_groups=1)
    assert hand_outs(s) == [1], "a short queue would never have more"


def test_a_step_of_an_earlier_incarnation_of_the_trainer_does_not_count(scene: MakeScene):
    s = scene()
    ready(s)
    train(s)
    s.say("actor-0", TrainerStarted(2))
    s.say("actor-0", StepTrained(0, incarnation=1))
    assert s.hub.state.step == 0
    s.say("actor-0", StepTrained(0, incarnation=2))
    assert s.hub.state.step == 1
    s.heard("actor-0")
    s.say("actor-0", TrainerStarted(3))
    assert s.heard("actor-0") == [RestartPoint(3, 1)]


def test_the_batches_that_a_dead_trainer_held_for_other_tasks_go_out_again(scene: MakeScene):
    s = scene(tasks=TASKS)
    ready(s)
    first = take(s, "actor-0")
    s.say("actor-0", TrainerStarted(2))
    s.heard("actor-0")
    second = take(s, "actor-0", request_id=2)
    assert first is not None and second is not None and rows_of(second) == rows_of(first)
    assert s.hub.state.tasks["reference"].returned == len(rows_of(first))


def test_a_trainer_that_dies_again_and_again_in_one_step_ends_the_run_with_the_first_error_of_its_last_death(
    scene: MakeScene,
):
    s = scene()
    for incarnation in range(2, 3 + MAX_RESTARTS_IN_STEP):
        assert not s.hub.context.failure
        s.say("actor-1/worker", ActorFailed(f"RuntimeError: fault {incarnation}"))
        s.say("actor-0/worker", ActorFailed("PeerGone: actor-1 is gone"))
        s.say("actor-0", TrainerStarted(incarnation))
    assert s.hub.context.failure == (
        "the trainer died 4 times before step 1 was trained: actor-1: RuntimeError: fault 5"
    )


def test_a_trainer_hears_how_often_it_died_of_a_full_gpu_whichever_rank_met_it(scene: MakeScene):
    s = scene()
    s.say("actor-1/worker", ActorFailed("CUDA out of memory", is_memory_full=True))
    s.say("actor-0/worker", ActorFailed("PeerGone: actor-1 is gone"))
    s.say("actor-0", TrainerStarted(2))
    assert s.heard("actor-0") == [RestartPoint(2, 0, num_memory_deaths=1)]
    s.say("actor-0/worker", ActorFailed("RuntimeError: another fault"))
    s.say("actor-0", TrainerStarted(3))
    assert s.heard("actor-0") == [RestartPoint(3, 0, num_memory_deaths=1)]
    assert replay(s.path) == s.hub.state


def test_restarts_of_the_trainer_in_different_steps_do_not_end_the_run(scene: MakeScene):
    s = scene()
    for step in range(2 * MAX_RESTARTS_IN_STEP):
        s.say("actor-0", TrainerStarted(step + 2))
        ready(s)
        train(s)
        s.say("actor-0", StepTrained(step, incarnation=step + 2))
    assert s.hub.state.trainer_restarts == 2 * MAX_RESTARTS_IN_STEP and not s.hub.context.failure


def test_a_lost_batch_comes_again_beside_one_of_another_task_with_the_same_number(scene: MakeScene):
    tasks = {name: Task(name, yields=(f"{name}_column",)) for name in ("reference", "weigh")}
    s = scene(tasks={**tasks, "train": Task("train")})
    ready(s, num_groups=1)
    assert take(s, "reference-0") is not None
    for request_id in (2, 3):
        s.say("reference-0", RequestRows(request_id, list(tasks), open_batches=(("reference", 1),)))
        (batch,) = s.heard("reference-0")
        assert isinstance(batch, RowBatch) and (batch.task, batch.batch_id) == ("weigh", 1)
