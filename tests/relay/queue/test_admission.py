"""Admission: the staleness bound holds by construction, and a run never gets stuck."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.messages import GroupId, RowId
from headrace.comm.recipe import BatchSettings, QueueSettings
from headrace.relay.journal import events as ev
from headrace.relay.journal.state import HubState, RowStatus, apply
from headrace.relay.queue.admission import Admission


class SmallRun:
    """A run of one-sample groups under an admission rule."""

    def __init__(self, bound: int | None, per_step: int, steps: int = 8, capacity: int | None = None) -> None:
        self.admission = Admission(
            BatchSettings(prompts_per_step=per_step, samples_per_prompt=1),
            QueueSettings(capacity=capacity, max_staleness=bound),
            steps,
        )
        self.state = HubState()
        apply(ev.Opened(epoch=1, samples_per_prompt=1), self.state)

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


def test_a_bound_of_zero_admits_one_batch_per_version():
    run = SmallRun(bound=0, per_step=3)
    assert [run.lease(0) for _ in range(4)] == [True, True, True, False]


def test_without_a_bound_the_capacity_limits_leases():
    run = SmallRun(bound=None, per_step=2, capacity=4)
    assert [run.lease(0) for _ in range(5)] == [True, True, True, True, False]


def test_without_a_capacity_the_queue_follows_the_trainer_by_half_of_what_a_step_lacks_or_has_left():
    run = SmallRun(bound=None, per_step=4)
    capacities = []
    for num_ready in (1, 0, 8, 6, 6, 4, 4):
        while len(run.state.queued()) < num_ready:
            group = GroupId(0, run.state.cursor)
            apply(ev.Leased(group=group, samples=[0], attempt=1, version=0, holder="r"), run.state)
            run.finish(group)
        run.admission.follow(run.state)
        capacities.append(run.admission.capacity)
        while run.state.queued()[4:]:
            handed = run.state.queued()[0].id
            apply(ev.Handed(step=0, groups=[handed]), run.state)
    assert capacities == [6, 8, 6, 5, 4, 4, 4]


def test_a_new_group_waits_for_a_version_that_is_due_only_while_the_trainer_has_its_step():
    run = SmallRun(bound=None, per_step=1)
    assert run.lease(0)
    run.finish(GroupId(0, 0))
    assert run.train_if_ready() and run.lease(0)
    run.finish(GroupId(0, 1))
    (group,) = run.admission.select_groups(run.state)
    apply(ev.Handed(step=1, groups=[group.id]), run.state)
    assert not run.lease(0)
    apply(ev.Published(version=1, digest="", relay="relay-0"), run.state)
    assert run.lease(1)


def test_a_selection_ends_with_the_group_that_reaches_the_tokens():
    run = SmallRun(bound=None, per_step=3)
    while run.lease(0):
        pass
    for group in run.unfinished():
        run.finish(group)
    oldest = [group.id for group in run.admission.select_groups(run.state)]
    assert len(oldest) == 3 and [group.id for group in run.admission.select_groups(run.state, 2)] == oldest[:2]


def test_no_more_groups_are_leased_than_the_last_steps_need():
    run = SmallRun(bound=None, per_step=2, steps=1)
    assert [run.lease(0) for _ in range(3)] == [True, True, False]


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
)
def test_the_bound_holds_for_any_order_of_finishing(bound: int, per_step: int, lags: list[int], choices: list[int]):
    run = SmallRun(bound=bound, per_step=per_step)
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
