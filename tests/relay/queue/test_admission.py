"""Admission: the staleness bound holds by construction, and a run never gets stuck."""

from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.messages import GroupId, RowId
from headrace.comm.recipe import BatchSettings, QueueSettings
from headrace.relay.journal import events as ev
from headrace.relay.journal.state import HubState, RowStatus, apply
from headrace.relay.queue.admission import Admission
from headrace.relay.queue.samplers import Budget, Candidate, Sampler


class SmallRun:
    """A run of one-sample groups under an admission rule."""

    def __init__(
        self,
        bound: int | None,
        per_step: int,
        steps: int = 8,
        lead: Literal["auto"] | int = "auto",
        sampler: Sampler | None = None,
        micro_tokens: int = 0,
        samples: int = 1,
    ) -> None:
        self.admission = Admission(
            BatchSettings(prompts_per_step=per_step, samples_per_prompt=samples),
            QueueSettings(max_staleness=bound, lead=lead),
            steps,
            sampler=sampler,
            micro_tokens=micro_tokens,
        )
        self.state = HubState()
        apply(ev.Opened(epoch=1, samples_per_prompt=samples), self.state)

    def widen(self, num_groups: int) -> None:
        """Let the window be of so many groups."""
        self.state.window.limit = num_groups

    def lease(self, version: int) -> bool:
        if not self.admission.may_lease(self.state, version):
            return False
        group = GroupId(0, self.state.cursor)
        apply(ev.Leased(group=group, samples=[0], attempt=1, version=version, holder="r"), self.state)
        return True

    def finish(self, group: GroupId) -> None:
        version = self.state.groups[group].rows[0].version
        row = group.row(0)
        apply(ev.RowReady(row=row, units=["u"], version=version, num_tokens=1, reward=0.0), self.state)

    def unfinished(self) -> list[GroupId]:
        return [g.id for g in self.state.queued() if g.samples(RowStatus.LEASED)]

    def train_if_ready(self) -> bool:
        for group in self.admission.select_groups(self.state):
            apply(ev.Handed(step=self.state.step, groups=[group.id]), self.state)
        if self.admission.open_slots(self.state) > 0:
            return False
        apply(ev.Trained(step=self.state.step), self.state)
        return True

    def train_whole_step(self) -> None:
        """Lease as many groups as a step takes, finish them, and train the step."""
        while self.state.num_queued < self.admission.per_step and self.lease(self.state.version):
            pass
        for group in self.unfinished():
            self.finish(group)
        assert self.train_if_ready()


class NewestFirst:
    """A sampler that would leave the groups that are due to the last."""

    def sample(self, candidates: Sequence[Candidate], budget: Budget) -> Sequence[Candidate]:
        return sorted(candidates, key=lambda each: -each.lease_order)[: budget.items]


def test_a_group_that_is_due_goes_before_the_choice_of_a_sampler():
    run = SmallRun(bound=1, per_step=1, lead=3, sampler=NewestFirst())
    assert run.lease(0) and run.lease(0)
    for group in run.unfinished():
        run.finish(group)
    assert [group.id for group in run.admission.select_groups(run.state)] == [GroupId(0, 1)]
    assert run.train_if_ready() and run.lease(1)
    run.finish(GroupId(0, 2))
    assert [group.id for group in run.admission.select_groups(run.state)] == [GroupId(0, 0)]


def test_a_bound_of_zero_admits_one_batch_per_version():
    run = SmallRun(bound=0, per_step=3)
    assert [run.lease(0) for _ in range(4)] == [True, True, True, False]


def test_a_fixed_lead_is_the_length_of_the_queue():
    run = SmallRun(bound=None, per_step=2, lead=3)
    assert [run.lease(0) for _ in range(4)] == [True, True, True, False]


def test_before_the_window_is_known_two_steps_of_groups_are_leased():
    run = SmallRun(bound=None, per_step=2)
    assert [run.lease(0) for _ in range(5)] == [True] * 4 + [False]


def test_with_a_bound_as_many_steps_of_groups_are_leased_at_first_as_it_allows():
    assert [SmallRun(bound=bound, per_step=2).admission.first_lead for bound in (0, 1, 3)] == [2, 4, 8]


@pytest.mark.parametrize(("micro_tokens", "lead"), [(0, 2), (3, 3), (100, 4)])
def test_the_window_limits_the_queue_and_leaves_a_micro_batch_at_least(micro_tokens: int, lead: int):
    run = SmallRun(bound=None, per_step=4, micro_tokens=micro_tokens)
    run.train_whole_step()
    run.state.window.limit = 1.5
    assert run.admission.lead(run.state) == lead


def test_a_queue_that_a_sampler_chooses_from_has_a_step_at_least():
    run = SmallRun(bound=None, per_step=4, sampler=NewestFirst())
    run.train_whole_step()
    run.state.window.limit = 1.5
    assert run.admission.lead(run.state) == 4


def test_new_groups_wait_for_the_version_of_the_last_step_while_the_trainer_has_work():
    run = SmallRun(bound=None, per_step=1)
    apply(ev.Published(version=0, digest="", relay="relay-0"), run.state)
    run.train_whole_step()
    run.widen(4)
    assert run.lease(0)
    run.finish(run.unfinished()[0])
    assert not run.lease(0)
    apply(ev.Published(version=1, digest="", relay="relay-0"), run.state)
    assert run.lease(1)


def test_new_groups_do_not_wait_for_a_version_that_takes_longer_than_the_trainer_has_work():
    run = SmallRun(bound=None, per_step=1)
    run.train_whole_step()
    run.widen(4)
    assert run.lease(0)
    run.finish(run.unfinished()[0])
    window = run.state.window
    window.per_step, window.step_s, window.publish_s = 1, 1.0, 2.0
    assert run.lease(0)


def test_a_step_that_lacks_groups_does_not_wait_for_a_version():
    run = SmallRun(bound=None, per_step=2)
    run.train_whole_step()
    run.widen(4)
    assert run.lease(0)
    run.finish(run.unfinished()[0])
    (group,) = run.admission.select_groups(run.state)
    apply(ev.Handed(step=1, groups=[group.id]), run.state)
    assert run.lease(0), "nothing is queued, and the step is not complete"


def test_a_fixed_lead_waits_for_no_version():
    run = SmallRun(bound=None, per_step=1, lead=2)
    run.train_whole_step()
    assert run.lease(0) and run.lease(0)


def test_a_selection_ends_with_the_group_that_reaches_the_tokens():
    run = SmallRun(bound=None, per_step=3)
    while run.lease(0):
        pass
    for group in run.unfinished():
        run.finish(group)
    oldest = [group.id for group in run.admission.select_groups(run.state)]
    assert len(oldest) == 3 and [group.id for group in run.admission.select_groups(run.state, 2)] == oldest[:2]


def test_no_more_groups_are_leased_than_the_last_steps_need():
    run = SmallRun(bound=None, per_step=2, steps=2, lead=8)
    assert [run.lease(0) for _ in range(5)] == [True, True, True, True, False]
    for group in run.unfinished():
        run.finish(group)
    assert run.train_if_ready() and not run.lease(0)


def test_the_rest_of_a_group_is_leased_only_while_its_ready_rows_are_within_the_bound():
    run = SmallRun(bound=1, per_step=1, samples=2)
    group, state = GroupId(0, 0), run.state
    apply(ev.Leased(group=group, samples=[0, 1], attempt=1, version=0, holder="r"), state)
    run.finish(group)
    apply(ev.Returned(group=group, attempt=1, reason="dead"), state)
    for step, is_within in ((1, True), (2, False)):
        state.step = state.version = step
        assert run.admission.may_lease(state, step, state.groups[group]) is is_within


def test_a_step_waits_for_an_unfinished_group_that_is_due():
    run = SmallRun(bound=0, per_step=2)
    assert run.lease(0) and run.lease(0)
    run.finish(GroupId(0, 0))
    assert not run.train_if_ready()
    run.finish(GroupId(0, 1))
    assert run.train_if_ready()


def test_a_failed_group_frees_its_place():
    run = SmallRun(bound=0, per_step=1)
    assert run.lease(0) and not run.lease(0)
    apply(ev.RowFailed(row=RowId(0, 0, 0), reason="x"), run.state)
    assert run.lease(0)


@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(0, 3),
    per_step=st.integers(1, 4),
    lags=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=50),
    sampler=st.sampled_from([None, NewestFirst()]),
)
def test_the_bound_holds_for_any_order_of_finishing_and_a_sampler(
    bound: int, per_step: int, lags: list[int], choices: list[int], sampler: Sampler | None
):
    run = SmallRun(bound=bound, per_step=per_step, sampler=sampler)
    turn = 0
    while run.state.step < 8:
        turn += 1
        choice = choices[turn % len(choices)]
        version = max(0, run.state.step - lags[turn % len(lags)])
        while run.lease(version):
            pass
        while run.lease(run.state.step) and choice % 3:
            pass
        unfinished = run.unfinished()
        if unfinished:
            run.finish(unfinished[choice % len(unfinished)])
        run.train_if_ready()
        assert turn < 2000, "the run is stuck"
    assert max(run.state.staleness) <= bound


@settings(max_examples=200, deadline=None)
@given(
    bound=st.integers(0, 3),
    per_step=st.integers(1, 4),
    num_handed=st.integers(0, 4),
    versions=st.lists(st.integers(0, 6), max_size=14),
    new=st.integers(0, 6),
)
def test_a_lease_is_admitted_exactly_if_all_groups_in_turn_meet_their_deadlines(
    bound: int, per_step: int, num_handed: int, versions: list[int], new: int
):
    run = SmallRun(bound=bound, per_step=per_step, lead=100, steps=100)
    state, step = run.state, 4
    state.step = state.version = step
    for number, version in enumerate([step] * min(num_handed, per_step) + versions):
        group = GroupId(0, number)
        apply(ev.Leased(group=group, samples=[0], attempt=1, version=version, holder="r"), state)
        if number < min(num_handed, per_step):
            run.finish(group)
            apply(ev.Handed(step=step, groups=[group]), state)
    trained_in = (step, *[step] * (per_step - len(state.in_training) - 1))[: per_step - len(state.in_training)]
    places = [*trained_in, *(step + 1 + place // per_step for place in range(100))]
    expected = all(place <= version + bound for place, version in zip(places, sorted([*versions, new]), strict=False))
    assert run.admission.may_lease(state, new) == expected
