"""The hub's state is a fold over events, and its account always adds up."""

from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.comm.messages import GroupId, RowId, RowRef
from headrace.relay.journal import events as ev
from headrace.relay.journal.records import QueueIndex, RowStatus
from headrace.relay.journal.replay import replay
from headrace.relay.journal.state import HubState, apply

GROUP = GroupId(0, 7)


def fold(*events: ev.Event) -> HubState:
    state = HubState()
    for event in (ev.Opened(epoch=1, samples_per_prompt=2), *events):
        apply(event, state)
    return state


def leased(group: GroupId = GROUP, attempt: int = 1, samples: tuple[int, ...] = (0, 1), version: int = 0) -> ev.Leased:
    return ev.Leased(group=group, samples=list(samples), attempt=attempt, version=version, holder="rollout-0")


def ready(sample: int, version: int = 0, reward: float = 1.0) -> ev.RowReady:
    row = GROUP.row(sample)
    return ev.RowReady(row=row, units=["relay-0#1"], version=version, num_tokens=5, reward=reward)


def failed(sample: int) -> ev.RowFailed:
    return ev.RowFailed(row=GROUP.row(sample), reason="no reward")


def moved(source: str) -> ev.Moved:
    return ev.Moved(rows=[GROUP.row(0)], attempts=[2], source=source, holder="rollout-2")


def restored(row: RowId, is_partial: bool = False) -> ev.GroupRestored:
    return ev.GroupRestored(
        group=GROUP, rows=[RowRef(row, 1, ["relay-0#1"], version=0, num_tokens=5, is_partial=is_partial)]
    )


GIVEN_BACK = ev.Returned(group=GROUP, attempt=1, reason="dead")
LOST = ev.UnitLost(unit="relay-0#1", reason="dead")


def test_a_journal_of_an_older_release_with_the_step_of_a_version_still_verifies(tmp_path: Path):
    journal = tmp_path / "journal.jsonl"
    journal.write_text(
        '{"event":"Opened","t":1.0,"epoch":1,"samples_per_prompt":2}\n'
        '{"event":"Published","t":2.0,"version":3,"step":3,"digest":"d1","relay":"relay-0"}\n'
        '{"event":"Received","t":3.0,"version":3,"step":3,"digest":"d1","holder":"rollout-0"}\n'
    )
    state = replay(journal)
    assert (state.version, state.digest) == (3, "d1")
    assert not hasattr(ev.Published(version=3, digest="d1", relay="relay-0"), "step")


def test_a_trajectory_that_is_leased_twice_counts_as_leased_once():
    state = fold(leased(), GIVEN_BACK, leased(attempt=2))
    assert state.account.leased == 2
    assert state.in_flight == 2
    assert state.cursor == 1


def test_a_restored_group_has_its_saved_rows_and_wants_the_others():
    state = fold(restored(GROUP.row(0)))
    assert state.groups[GROUP].samples(RowStatus.READY) == [0]
    assert state.unassigned == {GROUP: None} and state.is_balanced


def test_a_trained_group_leaves_and_counts_its_staleness():
    state = fold(leased(), ready(0), ready(1), ev.Handed(step=0, groups=[GROUP]), ev.Trained(step=0))
    assert state.account.trained == 2
    assert state.staleness == {0: 2}
    assert state.groups == {}
    assert state.step == 1


def test_a_group_is_as_old_as_its_oldest_row():
    state = fold(leased(), ready(0), GIVEN_BACK, leased(attempt=2, samples=(1,), version=3))
    assert state.groups[GROUP].version == 0 and state.queue.begun == {0: 1}


def test_a_failed_row_leaves_the_others_of_its_group_usable():
    state = fold(leased(), ready(0), failed(1))
    assert state.groups[GROUP].is_complete
    assert state.groups[GROUP].samples(RowStatus.READY) == [0]
    assert state.account.failed == 1
    assert state.is_balanced


def test_a_group_whose_rows_all_fail_leaves_the_queue():
    state = fold(leased(), failed(0), failed(1))
    assert state.queued() == []
    assert state.is_balanced


def test_only_the_unfinished_rows_of_a_dead_holder_come_back():
    state = fold(leased(), ready(0), GIVEN_BACK)
    assert state.groups[GROUP].samples(RowStatus.WANTED) == [1]
    assert state.groups[GROUP].samples(RowStatus.READY) == [0]


def test_after_a_restart_of_the_hub_all_untrained_rows_are_wanted_again():
    state = fold(leased(), ready(0), ev.Opened(epoch=2, samples_per_prompt=2))
    assert state.groups[GROUP].samples(RowStatus.WANTED) == [0, 1]
    assert state.unassigned == {GROUP: None}
    assert state.account.leased == 2


def test_a_resumed_run_may_use_a_storage_unit_with_the_name_of_a_lost_one():
    state = fold(LOST, ev.Opened(epoch=2, samples_per_prompt=2), leased(), ready(0))
    assert state.groups[GROUP].samples(RowStatus.READY) == [0]


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([ready(0)], id="a row that was never leased"),
        pytest.param([leased(), ready(0), ready(0)], id="a row that is ready twice"),
        pytest.param([leased(), leased(attempt=2)], id="a lease of what is leased"),
        pytest.param([restored(GroupId(0, 8).row(0))], id="a restored row of another group"),
        pytest.param([restored(GROUP.row(0), is_partial=True)], id="a restored row that is unfinished"),
        pytest.param([leased(), ev.Handed(step=0, groups=[GROUP])], id="a hand-out of an unfinished group"),
        pytest.param([ev.Trained(step=3)], id="a step out of turn"),
        pytest.param([leased(), GIVEN_BACK, leased(attempt=1)], id="an attempt that a row has had"),
        pytest.param([leased(), moved("rollout-1")], id="a move from a rollout that does not hold the row"),
        pytest.param([leased(), LOST, ready(0)], id="a row in a unit that is lost"),
        pytest.param(
            [leased(), ready(0), ready(1), ev.Handed(step=1, groups=[GROUP])], id="a hand-out for a step to come"
        ),
        pytest.param([leased(), ready(0), ev.GroupFiltered(group=GROUP)], id="a filter of an unfinished group"),
        pytest.param([ev.Checkpointed(step=1, path="")], id="a checkpoint of a step to come"),
    ],
)
def test_an_illegal_event_is_refused(events: list[ev.Event]):
    state = fold(*events[:-1])
    with pytest.raises(AssertionError):
        apply(events[-1], state)


class AnyLegalHistory(RuleBasedStateMachine):
    """Random legal events; the accounting identity holds after each."""

    def __init__(self) -> None:
        super().__init__()
        self.state = fold()
        self.num_leased = 0

    def any_row(self, data: st.DataObject, status: RowStatus) -> RowId | None:
        rows = [g.id.row(sample) for g in self.state.groups.values() for sample in g.samples(status)]
        return data.draw(st.sampled_from(rows)) if rows else None

    @rule(version=st.integers(0, 3))
    def lease_the_next(self, version: int):
        apply(leased(GroupId(0, self.num_leased), version=version), self.state)
        self.num_leased += 1

    @rule(data=st.data(), is_good=st.booleans())
    def finish_a_row(self, data: st.DataObject, is_good: bool):
        row = self.any_row(data, RowStatus.LEASED)
        if row is None:
            return
        good = ev.RowReady(row=row, units=["relay-0#1"], version=0, num_tokens=1, reward=0.0)
        apply(good if is_good else ev.RowFailed(row=row, reason="x"), self.state)

    @rule(data=st.data())
    def lose_a_holder(self, data: st.DataObject):
        row = self.any_row(data, RowStatus.LEASED)
        if row is None:
            return
        group = self.state.groups[row.group]
        apply(ev.Returned(group=group.id, attempt=group.rows[row.sample].attempt, reason="dead"), self.state)

    @rule()
    def lease_again(self):
        for group_id in list(self.state.unassigned):
            group = self.state.groups[group_id]
            attempt = 1 + max(row.attempt for row in group.rows)
            apply(leased(group_id, attempt, tuple(group.samples(RowStatus.WANTED))), self.state)

    @rule()
    def hand_out_and_train(self):
        for group in [g for g in self.state.queued() if g.is_complete]:
            apply(ev.Handed(step=self.state.step, groups=[group.id]), self.state)
        apply(ev.Trained(step=self.state.step), self.state)

    @rule()
    def filter_what_is_complete(self):
        for group in [g for g in self.state.queued() if g.is_complete]:
            apply(ev.GroupFiltered(group=group.id), self.state)

    @rule()
    def restart_the_hub(self):
        apply(ev.Opened(epoch=self.state.epoch + 1, samples_per_prompt=2), self.state)

    @invariant()
    def account_adds_up(self):
        assert self.state.is_balanced
        assert self.state.account.leased == 2 * self.num_leased

    @invariant()
    def the_index_is_that_of_the_groups(self):
        index = QueueIndex()
        for group in self.state.queued():
            index.update(group)
        assert (self.state.queue, self.state.num_queued) == (index, len(self.state.queued()))


TestAnyLegalHistory = AnyLegalHistory.TestCase


def test_a_trainer_that_starts_again_has_the_groups_of_its_step_and_no_earlier_incarnation_follows_it():
    state = fold(leased(), ready(0), ready(1), ev.Handed(step=0, groups=[GROUP]), ev.TrainerRestarted(incarnation=2))
    assert (state.in_training, state.trainer_restarts, state.restarts_in_step) == ([GROUP], 1, 1)
    with pytest.raises(AssertionError):
        apply(ev.TrainerRestarted(incarnation=2), state)
    apply(ev.Trained(step=0), state)
    assert (state.account.trained, state.trainer_restarts, state.restarts_in_step) == (2, 1, 0)
    apply(ev.Opened(epoch=2, samples_per_prompt=2), state)
    apply(ev.TrainerRestarted(incarnation=2), state)
