"""The six schedules: their rules as properties of the hub's state, for any order of events."""

import math
from random import Random
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.comm.messages import GroupId
from headrace.comm.recipe import BatchSettings, QueueSettings, ScheduleName
from headrace.launch.config.checks.recipe import check_recipe, check_settings
from headrace.launch.config.load import SettingError, read_recipe
from headrace.relay.journal import events as ev
from headrace.relay.journal.state import HubState, RowStatus, apply
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.schedules import SCHEDULES, schedule_of
from headrace.rollout.pacing import RolloutPacing

STEPS = 6


class Run:
    """A run of groups of one sample under a schedule; the caller chooses each event, and `log` has them in order."""

    def __init__(self, schedule: str, per_step: int) -> None:
        batch = BatchSettings(prompts_per_step=per_step, samples_per_prompt=1)
        self.admission = Admission(batch, QueueSettings(), STEPS, SCHEDULES[schedule])
        self.state = HubState()
        self.log: list[ev.Event] = []
        self.do(ev.Opened(epoch=1, samples_per_prompt=1))

    def do(self, event: ev.Event) -> None:
        apply(event, self.state)
        self.log.append(event)

    def lease(self, version: int) -> bool:
        if not self.admission.may_lease(self.state, version):
            return False
        group = GroupId(0, self.state.cursor)
        self.do(ev.Leased(group=group, samples=[0], attempt=1, version=version, holder="r"))
        return True

    def lease_again(self, version: int) -> None:
        for group_id in list(self.state.unassigned):
            if self.admission.may_lease(self.state, version, self.state.groups[group_id]):
                attempt = 1 + self.state.groups[group_id].rows[0].attempt
                self.do(ev.Leased(group=group_id, samples=[0], attempt=attempt, version=version, holder="r"))

    def end_one(self, choice: int, with_losses: bool) -> None:
        """One of the running trajectories finishes; with losses, some fail or lose their rollout."""
        groups = [g for g in self.state.queued() if g.samples(RowStatus.LEASED)]
        if not groups:
            return
        group = groups[choice % len(groups)]
        row = group.id.row(0)
        if with_losses and choice % 11 == 0:
            self.do(ev.RowFailed(row=row, reason="x"))
        elif with_losses and choice % 7 == 0:
            self.do(ev.Returned(group=group.id, attempt=group.rows[0].attempt, reason="died"))
        else:
            version = group.rows[0].version
            self.do(ev.RowReady(row=row, units=["u"], version=version, num_tokens=1, reward=0.0))

    def train(self) -> None:
        for group in self.admission.select_groups(self.state):
            self.do(ev.Handed(step=self.state.step, groups=[group.id]))
        if self.admission.open_slots(self.state) == 0:
            self.do(ev.Trained(step=self.state.step))

    def play(self, seed: int, with_losses: bool = True) -> None:
        """Let rollouts with the newest version or the one before it work at random until all steps are trained."""
        random = Random(seed)
        for _ in range(3000):
            if self.state.step == STEPS:
                return
            version = max(0, self.state.step - random.randrange(2))
            self.lease_again(version)
            while self.lease(version):
                pass
            self.end_one(random.randrange(10**6), with_losses)
            if random.random() < 0.4:
                self.train()
        raise AssertionError("the run is stuck")


SEEDS = st.integers(0, 10**6)


@pytest.mark.parametrize(("schedule", "bound"), [("sync", 0), ("stream_sync", 0), ("one_step", 1), ("stream", 1)])
@settings(max_examples=40, deadline=None)
@given(per_step=st.integers(1, 4), seed=SEEDS)
def test_a_schedule_keeps_its_staleness_for_any_order_of_events(schedule: str, bound: int, per_step: int, seed: int):
    run = Run(schedule, per_step)
    run.play(seed)
    assert max(run.state.staleness) <= bound
    assert run.state.account.trained == STEPS * per_step and run.state.is_balanced


@pytest.mark.parametrize("schedule", ["sync", "stream_sync", "one_step", "stream"])
@settings(max_examples=40, deadline=None)
@given(per_step=st.integers(2, 4), seed=SEEDS)
def test_no_batch_begins_before_the_one_before_it_is_complete(schedule: str, per_step: int, seed: int):
    run = Run(schedule, per_step)
    run.play(seed, with_losses=False)
    num_begun, num_ended = 0, 0
    for event in run.log:
        if isinstance(event, ev.Leased):
            assert num_ended >= num_begun // per_step * per_step
            num_begun += 1
        num_ended += isinstance(event, ev.RowReady)


@pytest.mark.parametrize("schedule", ["sync", "one_step"])
@settings(max_examples=40, deadline=None)
@given(per_step=st.integers(1, 4), seed=SEEDS)
@example(per_step=2, seed=10312)  # a returned row may get another version
def test_whole_batches_are_handed_out_at_once(schedule: str, per_step: int, seed: int):
    run = Run(schedule, per_step)
    run.play(seed)
    handed = [isinstance(event, ev.Handed) for event in run.log]
    batches = "".join("x" if is_handed else " " for is_handed in handed).split()
    assert {len(batch) % per_step for batch in batches} == {0}


def test_stream_sync_hands_a_group_out_while_others_of_its_batch_are_generated():
    run = Run("stream_sync", per_step=2)
    assert run.lease(0) and run.lease(0) and not run.lease(0)
    run.end_one(0, with_losses=False)
    run.train()
    assert (len(run.state.in_training), run.state.step) == (1, 0)
    assert not run.lease(0), "no group of the next batch begins before the next version"
    run.end_one(0, with_losses=False)
    run.train()
    assert run.state.step == 1 and not run.lease(0) and run.lease(1)


def test_every_schedule_of_the_recipe_has_its_rules():
    assert get_args(ScheduleName) == tuple(SCHEDULES)


def test_under_a_barrier_schedule_each_rollout_takes_its_share_at_once():
    cycle = RolloutPacing.of(SCHEDULES["one_step"], prompts_per_step=10, num_rollouts=4)
    assert cycle.share == 3 and cycle.free_slots(max_running=1, num_held=1) > 10**6
    assert RolloutPacing.of(SCHEDULES["headrace"], 10, 4).share == 3
    shares = {name: RolloutPacing.of(SCHEDULES[name], 10, 4).share_of(window=50) for name in SCHEDULES}
    assert shares == {"sync": 3, "stream_sync": 3, "one_step": 3, "stream": 3, "partial": math.inf, "headrace": 13}


@pytest.mark.parametrize(
    ("words", "ages"),
    [
        ([], []),
        (["rollout.max_age=never"], []),
        (["rollout.max_age=3"], [4, 5]),
        (["run.schedule=partial"], [1, 2, 3, 4, 5]),
    ],
)
def test_a_rollout_takes_weights_under_running_trajectories_beyond_an_age(words: list[str], ages: list[int]):
    recipe = read_recipe(None, words)
    pacing = RolloutPacing.of(schedule_of(recipe.run, recipe.rollout), prompts_per_step=16, num_rollouts=1)
    assert [age for age in range(6) if pacing.takes_weights(age, is_idle=False)] == ages
    assert [age for age in range(6) if pacing.takes_weights(age, is_idle=True)] == [1, 2, 3, 4, 5]


def test_only_headrace_relieves_a_trainer_that_starves_unless_the_age_is_never():
    assert [name for name, schedule in SCHEDULES.items() if schedule.switches_if_starved] == ["headrace"]
    by_age = {}
    for age in ("null", "never", "2"):
        recipe = read_recipe(None, [f"rollout.max_age={age}"])
        by_age[age] = schedule_of(recipe.run, recipe.rollout).switches_if_starved
    assert by_age == {"null": True, "never": False, "2": True}


@pytest.mark.parametrize("schedule", ["sync", "one_step", "partial"])
def test_an_age_is_refused_with_a_schedule_that_has_its_own_rule_for_new_weights(schedule: str):
    with pytest.raises(SettingError, match=rf"rollout\.max_age: run\.schedule={schedule}"):
        check_settings(read_recipe(None, [f"run.schedule={schedule}", "rollout.max_age=4"]))


def test_a_staleness_bound_is_refused_with_a_schedule_that_has_its_own():
    recipe = read_recipe(None, ["run.schedule=stream", "queue.max_staleness=2"])
    with pytest.raises(SettingError, match=r"queue\.max_staleness: run\.schedule=stream"):
        check_recipe(recipe)


@pytest.mark.parametrize("schedule", ["one_step", "sync"])
def test_a_queue_without_room_for_the_batch_that_a_schedule_waits_for_is_refused(schedule: str):
    words = [f"run.schedule={schedule}", "batch.prompts_per_step=4"]
    with pytest.raises(SettingError, match=rf"queue\.lead: run\.schedule={schedule} needs room .*=4, not 3"):
        check_settings(read_recipe(None, [*words, "queue.lead=3"]))
    check_settings(read_recipe(None, [*words, "queue.lead=4"]))
    check_settings(read_recipe(None, ["run.schedule=stream", "batch.prompts_per_step=4", "queue.lead=3"]))
