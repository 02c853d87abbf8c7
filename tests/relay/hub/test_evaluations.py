"""Evaluations at the hub: prompts go to rollouts on the version that is due, each sample is scored once, on that version."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hub_scene import Scene

from headrace.comm.messages import (
    DrainRequested,
    EvaluationResult,
    EvaluationsDone,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    LoadReport,
    RequestRows,
    SampleScored,
    StepTrained,
    TrainBatch,
    VersionReady,
)
from headrace.comm.messages.migration import ClaimRows
from headrace.comm.messages.weights import SwitchWeights
from headrace.comm.recipe import EvalSettings
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.relay.journal.replay import replay
from headrace.relay.queue.evaluation_prompts import EvaluationPrompts

PROMPTS = 6


class EvaluatedScene(Scene):
    """A hub that evaluates six prompts, twice each, every second version; two rollouts share them."""

    def __init__(self, folder: Path, schedule: str = "headrace", max_age: float = math.inf) -> None:
        rows = [f'{{"prompt": "e{i}"}}'.encode() for i in range(PROMPTS)]
        settings = EvalSettings(path="e.jsonl", every=2, samples=2, temperature=1.0)
        prompts = EvaluationPrompts({"e": rows}, settings, num_steps=10, num_shares=2)
        super().__init__(folder, evaluation=prompts, schedule=schedule, max_age=max_age)
        self.wall = time.time()
        self.hub.context.wall_clock = lambda: self.wall
        self.requests = 0

    def publish(self, version: int) -> None:
        self.say("relay-0/weights", VersionReady(version, f"digest {version}"))

    def ask(self, holder: str = "rollout-0", version: int = 0, num_groups: int = 99, **how: bool) -> LeaseGrant | None:
        self.requests += 1
        self.say(holder, LeaseRequest(self.requests, version, num_groups, **how))
        grants = self.heard(holder)
        assert len(grants) <= 1 and all(isinstance(grant, LeaseGrant) for grant in grants)
        return grants[0] if grants else None  # pyright: ignore[reportReturnType]

    def score(self, grant: LeaseGrant, holder: str = "rollout-0", version: int | None = None) -> None:
        for lease in grant.leases:
            for sample in lease.samples:
                versions = [grant.version if version is None else version]
                scored = {"num_tokens": 5, "is_truncated": False, "reward": float(sample)}
                self.say(
                    holder,
                    SampleScored(row=lease.group.row(sample), attempt=lease.attempt, versions=versions, **scored),
                )

    @property
    def results(self) -> list[dict[str, float]]:
        return self.hub.state.evaluations.results

    def begun(self) -> list[int]:
        """The version of each evaluation that began."""
        events = [event for _, event in read_events(self.path)]
        return [event.version for event in events if isinstance(event, ev.EvaluationBegun)]

    def check(self) -> None:
        assert replay(self.path) == self.hub.state and self.hub.state.is_balanced


@pytest.fixture
def scene(tmp_path: Path):
    scenes: list[EvaluatedScene] = []

    def make(schedule: str = "headrace", max_age: float = math.inf) -> EvaluatedScene:
        scenes.append(EvaluatedScene(tmp_path, schedule, max_age))
        scenes[-1].publish(0)
        return scenes[-1]

    yield make
    for each in scenes:
        each.check()
        each.close()


MakeScene = Callable[..., EvaluatedScene]


def test_the_prompts_of_an_evaluation_come_before_those_of_training(scene: MakeScene):
    s = scene()
    first, second = s.ask("rollout-0"), s.ask("rollout-1", only_evaluation=True)
    assert first and second and first.is_evaluation and second.is_evaluation
    assert (len(first.leases), len(second.leases)) == (3, 2), "an equal part of what is left for each"
    rest = s.ask("rollout-0", only_evaluation=True)
    assert rest and [bytes(lease.row) for lease in rest.leases] == [b'{"prompt": "e5"}']
    nothing = s.ask("rollout-0", only_evaluation=True)
    assert nothing and not nothing.leases
    training = s.ask("rollout-0")
    assert training and training.leases and not training.is_evaluation


def test_each_sample_is_scored_and_the_metrics_go_to_the_trainer_once(scene: MakeScene):
    s = scene()
    while (grant := s.ask(only_evaluation=True)) and grant.leases:
        s.score(grant)
        s.score(grant)  # a repeated report changes nothing
    (result,) = s.results
    assert (result["eval/version"], result["eval/e/avg@2"], result["eval/e/pass@2"]) == (0, 0.5, 1)
    s.finish(s.lease(request=99, num_groups=2))
    s.say("actor-0", RequestRows(1, ["train"], step=0))
    (batch,) = s.heard("actor-0")
    assert isinstance(batch, TrainBatch) and batch.evaluation == result
    s.say("actor-0", RequestRows(2, ["train"], step=0, received=len(batch.groups), evaluated=0))
    assert all(isinstance(each, TrainBatch) and not each.evaluation for each in s.heard("actor-0"))


def test_a_rollout_on_another_version_gets_prompts_of_training(scene: MakeScene):
    s = scene()
    assert s.ask("rollout-0", num_groups=1)
    s.publish(1)
    other = s.ask("rollout-1", version=1, can_continue=True)
    assert other and not other.is_evaluation


def test_the_samples_of_a_dead_rollout_are_given_out_again_on_the_same_version(scene: MakeScene):
    s = scene()
    lost = s.ask("rollout-0", num_groups=1)
    s.publish(1)
    s.hub.on_process_death("rollout-0", "dead")
    again = s.ask("rollout-1", version=1, can_continue=True)
    assert lost and again and (again.version, again.is_evaluation) == (0, True), (
        "an idle rollout goes back to the version"
    )
    assert again.leases[0].attempt == 2 and again.leases[0].group == lost.leases[0].group
    s.score(lost)
    assert not s.hub.state.evaluations.scores, "a score of the dead one's attempt is ignored"


def test_samples_whose_version_is_gone_are_missing_and_the_others_count(scene: MakeScene):
    s = scene()
    grant = s.ask("rollout-0", num_groups=2)
    assert grant is not None
    s.score(grant)
    s.publish(1)
    again = s.ask("rollout-1", version=1, can_continue=True)
    assert again is not None and again.version == 0
    groups, attempts = [lease.group for lease in again.leases], [lease.attempt for lease in again.leases]
    s.say("rollout-1", LeaseReturn(groups, attempts, is_gone=True))
    (result,) = s.results
    assert (result["eval/e/missing"], result["eval/e/avg@2"]) == (2 * PROMPTS - 4, 0.5)
    assert s.hub.state.evaluations.account["failed"] == 8


@pytest.mark.parametrize(
    ("schedule", "max_age", "can_continue"),
    [("headrace", math.inf, False), ("partial", math.inf, True), ("headrace", 1, True)],
)
def test_an_evaluation_that_no_rollout_can_go_back_to_begins_again_on_the_next_version(
    scene: MakeScene, schedule: str, max_age: float, can_continue: bool
):
    s = scene(schedule, max_age)
    grant = s.ask("rollout-0", num_groups=1)
    assert grant is not None
    s.say("rollout-0", LeaseReturn([grant.leases[0].group], [1]))  # new weights came first
    s.publish(1)
    again = s.ask("rollout-0", version=1, can_continue=can_continue)
    assert again is not None and (again.version, again.is_evaluation) == (1, True)
    assert s.begun() == [0, 1]


def test_a_version_that_is_gone_before_anyone_began_its_evaluation_leaves_it_to_the_next_one(scene: MakeScene):
    s = scene()
    s.publish(1)
    grant = s.ask("rollout-0", version=1, can_continue=True)
    assert grant is not None and grant.version == 0
    s.say("rollout-0", LeaseReturn([lease.group for lease in grant.leases], [1] * len(grant.leases), is_gone=True))
    again = s.ask("rollout-0", version=1, can_continue=True)
    assert again is not None and (again.version, again.is_evaluation) == (1, True)


def test_no_rollout_is_ordered_to_take_new_weights_midway_until_the_evaluation_is_complete(scene: MakeScene):
    """A rollout that is never empty could not go back to its version."""
    s = scene()
    grant = s.ask("rollout-0")
    s.publish(1)
    window = s.hub.state.window
    window.starved_s = window.step_s = 1.0
    load = LoadReport(
        version=0, num_running=1, num_waiting=0, kv_util=0, tokens=0, busy_s=1, idle_s=0, pull_s=0, peak_running=9
    )
    s.say("rollout-0", replace(load, version=1))
    s.say("rollout-1", load)
    assert s.heard("rollout-1") == []
    while grant and grant.leases:
        s.score(grant)
        grant = s.ask("rollout-0", only_evaluation=True)
    s.say("rollout-1", load)
    assert s.heard("rollout-1") == [SwitchWeights(0)]
    window.starved_s = window.step_s = 0.0  # no event has set them


def test_the_next_evaluation_waits_for_the_one_under_way(scene: MakeScene):
    s = scene()
    grant = s.ask("rollout-0")
    s.publish(2)
    assert (other := s.ask("rollout-1", version=2)) and not other.is_evaluation
    while grant and grant.leases:
        s.score(grant)
        grant = s.ask("rollout-0", only_evaluation=True)
    after = s.ask("rollout-1", version=2)
    assert after and (after.version, after.is_evaluation) == (2, True)


def test_a_sample_of_two_versions_has_no_score(scene: MakeScene):
    s = scene()
    grant = s.ask("rollout-0", num_groups=1)
    assert grant is not None
    s.score(grant, version=1)
    assert s.hub.state.evaluations.failed == 2


def test_a_sample_that_moved_is_scored_by_its_new_holder_alone(scene: MakeScene):
    s = scene()
    grant = s.ask("rollout-0", num_groups=1)
    assert grant is not None
    (lease,) = grant.leases
    rows = [lease.group.row(sample) for sample in lease.samples]
    s.say("rollout-1", ClaimRows(7, rows, [1, 1]))
    s.score(grant, "rollout-0")
    assert not s.hub.state.evaluations.scores
    assert list(s.hub.state.held) == ["rollout-1"]


def test_after_the_last_step_the_trainer_waits_for_the_last_evaluation(scene: MakeScene):
    s = scene()
    while (grant := s.ask(only_evaluation=True)) and grant.leases:
        s.score(grant)
    for step in range(10):
        s.say("actor-0", StepTrained(step))
    s.say("actor-0", RequestRows(1, ["train"], step=10, evaluated=0))
    s.publish(10)
    assert not s.heard("actor-0")
    while (grant := s.ask(version=10, only_evaluation=True)) and grant.leases:
        s.score(grant)
    (result,) = s.heard("actor-0")
    assert isinstance(result, EvaluationResult) and result.metrics["eval/version"] == 10
    s.say("actor-0", RequestRows(2, ["train"], step=10, evaluated=10))
    assert s.heard("actor-0") == [EvaluationsDone(2)]


def test_a_rollout_that_is_drained_does_not_take_the_answers_of_others(scene: MakeScene):
    s = scene()
    s.publish(0)
    while (grant := s.ask("rollout-0", only_evaluation=True)) and grant.leases:
        pass
    nothing = s.ask("rollout-1", only_evaluation=True)
    assert nothing is not None and not nothing.leases
    s.say("ctl-1", DrainRequested("rollout-2"))
    s.hub.on_process_death("rollout-0", "dead")
    s.say("rollout-1", LeaseRequest(nothing.request_id, 0, 99, only_evaluation=True))
    assert s.heard("rollout-1") == [nothing], "prompts under a number that is answered would never be taken"


def test_a_row_of_an_evaluation_that_cannot_be_used_has_no_score(scene: MakeScene):
    s = scene()
    assert s.hub.evaluations.prompts is not None
    rows, _ = s.hub.evaluations.prompts._rows[2]
    rows[2] = b"not JSON"  # pyright: ignore[reportIndexIssue]
    s.publish(0)
    while (grant := s.ask(only_evaluation=True)) and grant.leases:
        assert all(bytes(lease.row) != b"not JSON" for lease in grant.leases)
        s.score(grant)
    assert (s.hub.state.evaluations.evaluated, s.hub.state.evaluations.failed) == (2 * (PROMPTS - 1), 2)
    s.check()


def test_each_response_is_a_line_of_the_file_with_its_place_and_its_reward(scene: MakeScene):
    found = scene()
    grant = found.ask()
    assert grant is not None
    lease = grant.leases[1]
    said = {"attempt": lease.attempt, "versions": [0], "num_tokens": 2, "is_truncated": True, "text": "fünf\n5"}
    for sample, rest in ((0, {"reward": 0.5}), (1, {"reward": None, "failure": "late"})):
        scored = SampleScored(row=lease.group.row(sample), **said, **rest)  # pyright: ignore[reportArgumentType]
        found.say("rollout-0", scored)
        found.say("rollout-0", scored)  # a report that is repeated
    lines = [json.loads(line) for line in (found.path.parent / "evaluations.jsonl").read_text().splitlines()]
    common = {"version": 0, "name": "e", "row": 1, "tokens": 2, "truncated": True, "text": "fünf\n5"}
    assert lines == [
        common | {"sample": 0, "reward": 0.5, "failure": ""},
        common | {"sample": 1, "reward": None, "failure": "late"},
    ]
