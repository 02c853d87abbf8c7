"""The hub's orders to take new weights in the middle of trajectories, and their account."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hub_scene import Scene

from headrace.comm.messages import DrainRequested, LoadReport, Message, VersionReady, WeightsPulled
from headrace.comm.messages.weights import SwitchWeights
from headrace.comm.recipe import RepackSettings
from headrace.relay.journal import events as ev
from headrace.relay.journal.records import EvaluationLog
from headrace.relay.journal.replay import replay


class Starving(Scene):
    """A hub whose trainer starved for half of the last step; version 1 is out, and the queue has room."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder, per_step=1, lead=4, **settings)  # pyright: ignore[reportArgumentType]
        self.lease()
        self.hub.context.commit(ev.Trained(step=0))
        self.say("relay-0", VersionReady(1, "digest"))
        self.hub.state.window.starved_s = self.hub.state.window.step_s = 1.0

    def orders(self, **load: int) -> list[Message]:
        """What rollout-0 is told after a report of one trajectory that decodes, of ten before, on version 0."""
        self.report("rollout-0", **load)
        return self.heard("rollout-0")

    def report(self, sender: str, **load: int) -> None:
        counts = {"version": 0, "num_running": 1, "num_waiting": 0, "num_at_tools": 0, "peak_running": 10} | load
        facts: dict[str, Any] = {**counts, "kv_util": 0.0, "tokens": 0, "busy_s": 1.0, "idle_s": 0.0, "pull_s": 0.0}
        load_report = LoadReport(**facts, batch_bound=16)
        self.say(sender, load_report)


Make = Callable[..., Starving]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    scenes: list[Starving] = []

    def starving(**settings: object) -> Starving:
        scenes.append(Starving(tmp_path, **settings))
        return scenes[-1]

    yield starving
    for scene in scenes:
        scene.close()


def test_each_report_of_a_rollout_for_which_the_trainer_starves_brings_the_same_order(make: Make):
    scene = make()
    assert [scene.orders(), scene.orders()] == [[SwitchWeights(0)]] * 2, "the first may have come during a move"
    assert scene.orders(version=1) == []


def test_a_trainer_that_has_work_needs_no_order(make: Make):
    scene = make()
    scene.hub.state.window.starved_s = 0.0
    assert scene.orders() == []


def test_a_rollout_that_would_get_no_new_group_keeps_its_version(make: Make):
    scene = make()
    scene.lease("rollout-1", num_groups=3)
    scene.report("rollout-1", version=1)
    assert scene.orders() == [], "the queue is full"


def test_the_setting_never_forbids_the_order(make: Make):
    scene = make()
    admission = scene.hub.midway._admission  # pyright: ignore[reportPrivateUsage]
    admission.schedule = replace(admission.schedule, switches_if_starved=False)
    assert scene.orders() == []


def test_a_rollout_that_leaves_the_run_keeps_its_version(make: Make):
    scene = make()
    scene.say("launcher", DrainRequested("rollout-0"))
    assert SwitchWeights(0) not in scene.orders()


def test_the_report_of_a_dead_rollout_holds_no_other_one_back(make: Make):
    scene = make()
    scene.lease("rollout-1")
    scene.report("rollout-1")
    assert scene.orders() == []
    scene.hub.on_process_death("rollout-1", "dead")
    assert scene.orders() == [SwitchWeights(0)]


def test_the_report_of_a_rollout_that_has_left_holds_no_other_one_back(make: Make):
    scene = make()
    grant = scene.lease("rollout-1")
    scene.report("rollout-1")
    scene.say("launcher", DrainRequested("rollout-1"))
    assert scene.orders() == [], "it still works"
    scene.finish(grant, "rollout-1")
    assert scene.orders() == [SwitchWeights(0)]


def test_no_order_is_given_until_every_rollout_with_leases_has_reported_to_this_process_of_the_hub(make: Make):
    scene = make()
    scene.lease("rollout-1")
    assert scene.orders() == [], "repack may be able to help"
    scene.report("rollout-1", version=1)
    assert scene.orders() == [SwitchWeights(0)]


def test_where_no_trajectory_moves_rollouts_of_one_version_do_not_hold_each_other_back(make: Make):
    scene = make(repack=RepackSettings(period_s=0))
    scene.lease("rollout-1")
    scene.report("rollout-1")
    assert scene.orders() == [SwitchWeights(0)]


def test_a_report_that_brings_no_order_does_not_count_the_samples_of_an_evaluation(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    def count(log: EvaluationLog) -> int:
        raise AssertionError("all groups of the evaluation are looked at")

    scene = make()
    scene.hub.state.window.starved_s = 0.0
    monkeypatch.setattr(EvaluationLog, "open", property(count))
    assert scene.orders() == []


def test_the_journal_counts_what_continues_on_new_weights_by_its_reason(make: Make):
    scene = make()
    scene.say("rollout-0", WeightsPulled(1, "digest", num_unfinished=3, is_ordered=True))
    scene.say("rollout-1", WeightsPulled(1, "digest", num_unfinished=1))
    scene.say("rollout-1", WeightsPulled(1, "digest"))
    assert scene.hub.state.midway == {"starved": 1, "age": 1}
    assert replay(scene.path).midway == scene.hub.state.midway
    assert scene.hub.fleet_stats.snapshot(scene.hub.state).metrics["weights/midway"] == 2
