"""The window: it finds how many groups keep the trainer busy, from the times of events alone."""

import math

import pytest

from headrace.comm.messages import GroupId
from headrace.relay.journal import events as ev
from headrace.relay.journal.state import HubState, apply
from headrace.relay.journal.window import Window

STEP_S = 10.0


def pass_step(
    window: Window,
    generating: float,
    ready: int,
    waited_s: float = 0.0,
    pause_s: float = 0.0,
    queued: int | None = None,
) -> None:
    """A step of 100 groups: so many were in generation on average, and so many ready at least."""
    num_queued = int(generating) + ready if queued is None else queued
    window.pass_time(window.now + STEP_S - waited_s + pause_s, num_queued, num_queued - int(generating), 50)
    if waited_s:
        window.pass_time(window.now + waited_s, num_queued, 0, 50)
    window.end_step(100, STEP_S - waited_s, waited_s)


def started(generating: float = 40, ready: int = 20) -> Window:
    window = Window()
    window.pass_time(1000.0, 0, 0, 0)
    window.end_step(100, 3.0, 0.0)
    pass_step(window, generating, ready)
    return window


def test_until_a_whole_step_is_measured_the_window_has_no_limit():
    window = Window()
    window.pass_time(1000.0, 0, 0, 0)
    window.end_step(100, 3.0, 0.0)
    assert math.isinf(window.limit)


def test_the_first_window_is_what_was_queued():
    assert started(40, 20).limit == pytest.approx(60)


def test_groups_that_were_never_needed_leave_the_window_little_by_little():
    window = started(40, 20)
    limits = [window.limit]
    for _ in range(12):
        pass_step(window, 40, max(0, round(window.limit) - 40))
        limits.append(window.limit)
    assert limits == sorted(limits, reverse=True) and 40 <= limits[-1] <= 44
    assert limits[0] - limits[1] == pytest.approx(0.3 * (20 - 100 / 64))


def test_groups_in_generation_count_for_the_time_that_the_trainer_works():
    window = started(40, 0)
    for _ in range(30):
        pass_step(window, 20, 0, waited_s=0.04)
    assert window.in_generation == pytest.approx(20 * STEP_S / (STEP_S - 0.04), rel=1e-3)


def test_a_step_that_starved_adds_the_groups_that_were_missing_and_is_remembered():
    window = started(40, 0)
    before = window.limit
    pass_step(window, 40, 0, waited_s=1.0, queued=40)
    missing = 1.0 * 100 / (STEP_S - 1.0)
    assert window.starved_s == 1.0
    assert window.limit == pytest.approx(max(window.in_generation + missing, 1.08 * before))
    for _ in range(5):
        pass_step(window, 10, 30)
    assert window.limit == pytest.approx(1.08 * before * 0.99**5), "the floor fades"


def test_a_trainer_that_waits_beside_ready_groups_does_not_starve():
    window = started(40, 20)
    before = window.limit
    window.pass_time(window.now + STEP_S, 60, 20, 50)
    window.end_step(100, 7.0, 3.0)
    assert window.starved_s == 0 and window.in_generation + window.margin <= before + 40


def test_the_window_does_not_grow_where_the_rollouts_have_no_room_for_more():
    window = started(40, 20)
    pass_step(window, 30, 0, waited_s=5.0, queued=30)
    assert window.starved_s == 5.0 and window.floor == 0


def test_a_step_with_a_pause_is_not_measured():
    window = started(40, 20)
    before = (window.in_generation, window.margin, window.floor)
    pass_step(window, 0, 60, pause_s=5.0)
    assert (window.in_generation, window.margin, window.floor) == before


def test_the_step_in_which_a_run_starts_again_is_not_measured():
    window = started(40, 20)
    before = (window.in_generation, window.margin, window.floor)
    window.open()
    pass_step(window, 0, 0, waited_s=9.0)
    assert (window.in_generation, window.margin, window.floor) == before


def usual(window: Window) -> tuple[float, float, float, float]:
    return window.in_generation, window.margin, window.floor, window.step_s


def rows(window: Window, seconds: float, every_s: float = 0.5, queued: int = 60, ready: int = 20) -> None:
    """So many seconds during which a row becomes ready at each interval."""
    for _ in range(round(seconds / every_s)):
        window.pass_time(window.now + every_s, queued, ready, 50)
        window.row_ready()


@pytest.mark.parametrize("stall_s", [60.0, 6000.0])
def test_a_step_in_which_generation_stalled_is_not_measured(stall_s: float):
    window = started(40, 20)
    rows(window, STEP_S)
    window.end_step(100, STEP_S, 0.0)
    before = usual(window)
    rows(window, 4.0)
    window.pass_time(window.now + stall_s, 60, 0, 50)
    rows(window, 6.0)
    window.end_step(100, STEP_S, stall_s)
    assert usual(window) == before
    rows(window, STEP_S, queued=70)
    window.end_step(100, STEP_S, 0.0)
    assert usual(window) != before, "the next step is measured again"


def test_a_stall_that_began_before_the_end_of_a_step_keeps_the_next_one_from_being_measured():
    window = started(40, 20)
    rows(window, 4.0)
    window.pass_time(window.now + 6.0, 60, 10, 50)
    window.end_step(100, STEP_S, 0.0)
    before = usual(window)
    window.pass_time(window.now + 60.0, 60, 0, 50)
    rows(window, 4.0)
    window.end_step(100, STEP_S, 54.0)
    assert usual(window) == before


def test_a_time_in_which_no_group_is_generated_is_no_stall():
    window = started(40, 20)
    before = usual(window)
    rows(window, 4.0)
    window.pass_time(window.now + 600.0, 60, 60, 50)
    rows(window, 6.0)
    window.end_step(100, 610.0, 0.0)
    assert usual(window) != before


def test_stalls_in_every_step_are_the_usual_load_in_the_end():
    window = started(40, 20)
    before = usual(window)
    for step in range(5):
        assert (usual(window) == before) == (step < 5)
        window.row_ready()
        window.pass_time(window.now + 100.0, 60, 0, 50)
        window.end_step(100, STEP_S, 90.0)
    assert usual(window) != before


def test_one_step_that_starved_adds_about_a_step_of_groups_at_most():
    window = started(40, 20)
    for _ in range(3):
        before = window.limit
        window.row_ready()
        window.pass_time(window.now + 50.0, math.ceil(window.limit), 0, 50)
        window.end_step(100, 1.0, 49.0)
        assert before < window.limit <= before + max(100, before / 2)


def test_a_wide_window_may_grow_by_half_of_itself():
    window = started(900, 100)
    window.pass_time(window.now + 20.0, 1000, 0, 50)
    window.end_step(100, 4.0, 16.0)
    assert window.limit == pytest.approx(1500)


def leased(state: HubState, t: float) -> GroupId:
    group = GroupId(0, 0)
    apply(ev.Opened(t=1.0, epoch=1, samples_per_prompt=1), state)
    apply(ev.Leased(t=t, group=group, samples=[0], attempt=1, version=0, holder="r"), state)
    return group


@pytest.mark.parametrize("died", [True, False])
def test_the_step_in_which_a_dead_rollouts_leases_come_back_is_not_measured(died: bool):
    state = HubState()
    group = leased(state, 2.0)
    apply(ev.Returned(t=3.0, group=group, attempt=1, reason="", died=died), state)
    assert state.window.is_unusual == died, "a rollout that switches to another version returns leases too"


def test_the_step_in_which_rows_are_lost_is_not_measured():
    state = HubState()
    group = leased(state, 2.0)
    apply(ev.RowReady(t=3.0, row=group.row(0), units=["u#1"], version=0, num_tokens=1, reward=0.0), state)
    apply(ev.UnitLost(t=4.0, unit="u#1", reason="dead"), state)
    assert state.window.is_unusual


def test_the_clock_of_the_host_may_be_set_back():
    window = started(40, 20)
    window.pass_time(window.now - 500, 60, 20, 50)
    pass_step(window, 40, 20)
    assert 40 <= window.limit <= 60


def test_a_step_in_which_the_clock_was_set_forward_and_back_is_not_measured():
    window = Window()
    window.pass_time(1000.0, 0, 0, 0)
    window.end_step(100, 3.0, 0.0)
    window.pass_time(window.now + 2000, 60, 20, 50)
    window.pass_time(window.now - 3000, 60, 20, 50)
    pass_step(window, 40, 20)
    assert math.isinf(window.limit), "2000 s in which groups seemed to be generated would make it wide"


def test_a_trainer_that_reports_no_times_leaves_the_queue_as_it_begins():
    state = HubState()
    apply(ev.Opened(t=1.0, epoch=1, samples_per_prompt=1), state)
    for step in range(3):
        group = GroupId(0, step)
        apply(ev.Leased(t=2.0 + step, group=group, samples=[0], attempt=1, version=0, holder="r"), state)
        apply(ev.RowReady(t=2.1 + step, row=group.row(0), units=["u"], version=0, num_tokens=1, reward=0.0), state)
        apply(ev.Handed(t=2.2 + step, step=step, groups=[group]), state)
        apply(ev.Trained(t=2.3 + step, step=step), state)
    assert math.isinf(state.window.limit)


def test_the_time_until_a_version_is_complete_is_measured_from_the_end_of_its_step():
    window = started(40, 20)
    window.pass_time(window.now + 0.5, 60, 20, 0)
    window.publish(steps_late=0)
    assert window.published_groups == pytest.approx(100 * 0.5 / STEP_S)


def test_a_step_during_which_rollouts_work_on_an_evaluation_changes_nothing():
    window = started(40, 20)
    before = (window.in_generation, window.margin, window.step_s)
    window.pass_time(window.now + STEP_S / 2, 90, 10, 50, evaluating=True)
    window.pass_time(window.now + STEP_S / 2, 90, 10, 50)
    window.end_step(100, STEP_S, 0.0)
    assert (window.in_generation, window.margin, window.step_s) == before
    pass_step(window, 80, 20)
    assert window.in_generation > before[0]


def test_a_window_that_evaluations_always_share_is_measured_all_the_same():
    window = Window()
    window.pass_time(1000.0, 0, 0, 0)
    window.end_step(100, 3.0, 0.0)
    for _ in range(5):
        assert math.isinf(window.limit)
        window.pass_time(window.now + STEP_S, 60, 20, 50, evaluating=True)
        window.end_step(100, STEP_S, 0.0)
    assert window.limit == pytest.approx(60)
    pass_step(window, 40, 20)
    before = window.in_generation
    window.pass_time(window.now + STEP_S, 90, 10, 50, evaluating=True)
    window.end_step(100, STEP_S, 0.0)
    assert window.in_generation == before


def test_a_slow_reference_leaves_the_window_as_it_is():
    """A quarter as fast as the trainer: most groups wait for its columns, and the trainer waits too. More groups would only be older."""
    window = started(40, 20)
    before = window.limit
    for _ in range(5):
        window.pass_time(window.now + 4 * STEP_S, 60, 0, 50, 50)
        window.end_step(100, STEP_S, 3 * STEP_S)
    assert window.in_generation == pytest.approx(40) and window.limit == pytest.approx(before)
