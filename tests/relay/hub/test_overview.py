"""The status of a run: what each process does, how far the run is, and who waits for whom."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_scene import Scene
from support.in_memory import MemoryFleet

from headrace.comm.mailbox import Envelope
from headrace.comm.messages import (
    BusyReport,
    ColumnsAdded,
    DrainRequested,
    LoadReport,
    Message,
    RequestRows,
    RowBatch,
    StatusReport,
    StepTrained,
    TrainerState,
)
from headrace.comm.recipe import Recipe, RolloutSettings
from headrace.relay.hub.overview import SILENT_S, Overview, expected_names
from headrace.relay.journal.events import Ending
from headrace.relay.queue.tasks import Task

NAMES = ("hub", "actor-0", "relay-0", "rollout-0", "rollout-1")
ROLES = (("hub", 0), ("actor", 0), ("relay", 0), ("rollout", 0), ("rollout", 1))


class Watched:
    """A scene whose messages pass an overview first, and whose processes have joined."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.overview = Overview(scene.hub, NAMES, lambda: scene.now)
        self.fleets = {f"{role}-{index}": MemoryFleet.join_network(scene.network, role, index) for role, index in ROLES}

    def say(self, sender: str, message: Message) -> None:
        self.overview.observe(Envelope(sender, message))
        if not isinstance(message, TrainerState | BusyReport):
            self.scene.hub.handle(Envelope(sender, message))

    def load(self, sender: str, tokens: int = 0, *, busy_s: float = 0.0, **facts: int) -> None:
        known: dict[str, Any] = {"version": 0, "num_running": 0, "num_waiting": 0} | facts
        self.say(sender, LoadReport(**known, kv_util=0.0, tokens=tokens, busy_s=busy_s, idle_s=0.0, pull_s=0.0))

    def look(self) -> None:
        self.overview.look(self.fleets["hub-0"].members())

    def restart(self, role: str, index: int) -> None:
        """The process ends, and the next one of its name joins."""
        self.look()
        self.fleets[f"{role}-{index}"].leave()
        self.look()
        self.fleets[f"{role}-{index}"] = MemoryFleet.join_network(self.scene.network, role, index)
        self.look()

    def report(self) -> StatusReport:
        return self.overview.report(self.fleets["hub-0"].members())

    def state_of(self, name: str) -> str:
        return next(member.state for member in self.report().members if member.name == name)

    def waits(self) -> list[tuple[str, str, str, float]]:
        return [(wait.who, wait.whom, wait.what, wait.seconds) for wait in self.report().waits]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    scenes: list[Scene] = []

    def make(**settings: Any) -> Watched:
        scenes.append(Scene(tmp_path, **settings))
        return Watched(scenes[-1])

    yield make
    for scene in scenes:
        scene.close()


def test_a_process_that_has_not_joined_starts_and_one_without_a_report_loads(watched: Callable[..., Watched]):
    w = watched()
    w.fleets["rollout-1"].leave()
    w.scene.now = 4.0
    states = {member.name: (member.state, member.seconds) for member in w.report().members}
    assert [*states] == [*NAMES]
    assert states["rollout-0"] == ("loads", 4.0) and states["rollout-1"] == ("starts", 4.0)
    assert w.state_of("hub") == "decides"


def test_the_speed_of_a_rollout_is_that_of_its_last_reports(watched: Callable[..., Watched]):
    w = watched()
    for second in range(31):
        w.scene.now = float(second)
        w.load("rollout-0", tokens=100 * second if second < 20 else 2000 + 50 * (second - 20), num_running=3)
    found = next(member for member in w.report().members if member.name == "rollout-0")
    assert (found.state, found.tokens_per_s, found.version) == ("generates", 50.0, 0)
    w.load("rollout-0", tokens=0)  # a new process
    w.scene.now += 1
    w.load("rollout-0", tokens=7, num_running=1)
    assert next(member for member in w.report().members if member.name == "rollout-0").tokens_per_s == 7.0


def test_reports_that_waited_for_a_hub_do_not_count_as_speed(watched: Callable[..., Watched]):
    w = watched()
    for tokens in range(0, 2000, 100):
        w.scene.now += 0.001
        w.load("rollout-0", tokens=tokens, num_running=3)
    w.scene.now += 1.0
    w.load("rollout-0", tokens=2000, num_running=3)
    found = next(member for member in w.report().members if member.name == "rollout-0")
    assert found.tokens_per_s == pytest.approx(100.0, rel=0.05)


def test_a_rollout_is_at_work_if_it_has_been_since_its_last_report(watched: Callable[..., Watched]):
    w = watched()
    w.load("rollout-0", busy_s=1.0)
    w.load("rollout-0", busy_s=1.5)
    assert w.state_of("rollout-0") == "generates"
    w.load("rollout-0", busy_s=1.5)
    assert w.state_of("rollout-0") == "waits"
    w.load("rollout-0", busy_s=1.5, num_at_tools=1)
    assert w.state_of("rollout-0") == "at tools"
    w.load("rollout-0", busy_s=1.5, num_scoring=2)
    assert w.state_of("rollout-0") == "scores"


def test_a_trainer_without_groups_waits_for_the_rollouts_that_have_leases(watched: Callable[..., Watched]):
    w = watched(lead=3)
    w.scene.lease("rollout-1")
    w.say("actor-0", TrainerState("waits"))
    w.scene.now = 1.0
    w.load("rollout-1", num_running=2)
    assert not w.waits(), "a moment is no wait"
    w.scene.now = 4.0
    w.load("rollout-1", num_running=2)
    assert w.waits() == [("actor-0", "rollout-1", "groups (2 trajectories are there)", 4.0)]
    w.say("actor-0", TrainerState("trains"))
    assert w.state_of("actor-0") == "trains" and not w.waits()


def test_a_frozen_rollout_is_silent_and_the_run_waits_for_it(watched: Callable[..., Watched]):
    w = watched(lead=3)
    w.scene.lease("rollout-1")
    w.load("rollout-1", num_running=2)
    w.scene.now = SILENT_S + 1
    w.say("relay-0", BusyReport(1.0, 1.0))
    assert w.waits() == [("the run", "rollout-1", "silent, with 2 trajectories", SILENT_S + 1)]
    assert w.state_of("relay-0") == "serves"
    w.restart("rollout", 1)
    w.scene.now += 2
    w.load("rollout-0")
    found = next(member for member in w.report().members if member.name == "rollout-1")
    assert (found.state, found.seconds) == ("loads", 2.0), "its next process"
    w.fleets["rollout-1"].leave()
    assert w.state_of("rollout-1") == "gone"


def test_a_trainer_that_is_started_again_loads_and_its_first_process_speaks_for_all(watched: Callable[..., Watched]):
    w = watched()
    w.fleets["actor-1"] = MemoryFleet.join_network(w.scene.network, "actor", 1)
    w.say("actor-0", TrainerState("trains"))
    assert w.state_of("actor-0") == w.state_of("actor-1") == "trains"
    w.say("actor-0", TrainerState("waits"))
    w.scene.now = 5.0
    assert [wait[0] for wait in w.waits()] == ["actor-0"]
    w.restart("actor", 0)
    w.scene.now = 7.0
    assert w.state_of("actor-0") == w.state_of("actor-1") == "loads"
    w.fleets["actor-0"].leave()
    assert w.state_of("actor-0") == "gone"


def test_after_a_restart_of_the_hub_the_trainer_counts_as_at_work_until_it_says_something(
    watched: Callable[..., Watched],
):
    w = watched()
    w.scene.hub.state.hub_restarts = 1
    assert w.state_of("actor-0") == "trains" and w.state_of("rollout-0") == "loads"
    w.say("actor-0", TrainerState("saves"))
    assert w.state_of("actor-0") == "saves"
    w.restart("actor", 0)
    assert w.state_of("actor-0") == "loads"


def test_a_task_of_the_queue_works_while_it_has_rows_and_waits_otherwise(watched: Callable[..., Watched]):
    w = watched(tasks={"reference": Task("reference", yields=("ref_logprobs",)), "train": Task("train")})
    w.scene.boxes["reference-0"] = w.scene.mailboxes.open("reference-0")
    w.fleets["reference-0"] = MemoryFleet.join_network(w.scene.network, "reference", 0)
    w.say("reference-0", RequestRows(1, ["reference"]))
    w.scene.now = 6.0
    assert ("reference-0", "the rollouts", "rows", 6.0) in w.waits()
    w.scene.finish(w.scene.lease("rollout-0"))
    w.scene.now = 9.0
    assert w.state_of("reference-0") == "works" and "reference-0" not in [wait[0] for wait in w.waits()]
    number = 1
    while batches := w.scene.heard("reference-0"):
        for batch in batches:
            assert isinstance(batch, RowBatch)
            rows = [row.row for row in batch.rows()]
            units = [["relay-0#1"]] * len(rows)
            w.say("reference-0", ColumnsAdded("reference", batch.batch_id, ["ref_logprobs"], rows, units))
        number += 1
        w.say("reference-0", RequestRows(number, ["reference"]))
    w.scene.now = 13.0
    assert ("reference-0", "the rollouts", "rows", 4.0) in w.waits(), "the time of its work does not count"


def test_the_front_serves(watched: Callable[..., Watched]):
    w = watched()
    front = MemoryFleet.join_network(w.scene.network, "front", 0)
    assert w.state_of("front-0") == "serves"
    front.leave()
    assert [member.name for member in w.report().members] == [*NAMES]
    assert expected_names(Recipe(rollout=RolloutSettings(serve="0")))[-1] == "front-0"
    assert "front-0" not in expected_names(Recipe())


def test_the_shards_of_a_rollout_are_not_told(watched: Callable[..., Watched]):
    w = watched()
    MemoryFleet.join_network(w.scene.network, "shard", 0)
    assert [member.name for member in w.report().members] == [*NAMES]


def test_processes_that_leave_at_the_end_of_the_run_have_ended(watched: Callable[..., Watched]):
    w = watched()
    w.look()
    w.scene.hub.state.ending = Ending(status="finished")
    w.fleets["rollout-1"].leave()
    assert w.state_of("rollout-1") == "has ended"


def test_an_idle_rollout_waits_for_the_trainer_if_the_queue_is_full(watched: Callable[..., Watched]):
    w = watched(lead=1)
    w.scene.lease("rollout-1")
    w.load("rollout-0")
    w.scene.now = 3.0
    w.load("rollout-0")
    assert w.waits() == [("rollout-0", "actor-0", "room in the queue, which has 1 of at most 1 groups", 3.0)]


def test_a_drained_rollout_drains_and_then_is_gone(watched: Callable[..., Watched]):
    w = watched(lead=3)
    w.scene.lease("rollout-1")
    w.load("rollout-1", num_running=2)
    w.say("ctl-1", DrainRequested("rollout-1"))
    assert w.state_of("rollout-1") == "drains"
    w.fleets["rollout-1"].leave()
    assert "rollout-1" not in {member.name for member in w.report().members}


def test_the_status_has_the_reward_and_the_time_of_the_last_step(watched: Callable[..., Watched]):
    w = watched(lead=8)
    in_training = 0
    assert w.report().reward is None and w.report().num_steps == 10
    for step in range(3):
        w.scene.finish(w.scene.lease("rollout-0", request=step + 1, version=0, num_groups=2))
        w.say("actor-0", RequestRows(step + 1, ["train"], step))
        in_training = w.report().queue["in_training"]
        w.scene.now += 2.0
        w.say("actor-0", StepTrained(step))
    found = w.report()
    assert in_training == 2 == found.queue["step"] and found.queue["in_training"] == 0
    assert (found.step, found.reward, found.step_s, found.left_s) == (3, 0.5, 2.0, 14.0)
