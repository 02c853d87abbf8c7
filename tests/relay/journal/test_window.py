"""The window: it finds how many groups keep the trainer busy, from the times of events alone."""

import heapq
import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest

from headrace.comm.messages import GroupId
from headrace.relay.journal import events as ev
from headrace.relay.journal.records import RowStatus
from headrace.relay.journal.state import HubState, apply
from headrace.relay.journal.window import Window, mean_latency

GROUP_S = 0.1
PER_STEP = 10


class Line:
    """A window beside rollouts that generate each group in a time of its own, and a trainer that works for `GROUP_S` on one."""

    def __init__(self, latency_s: Callable[[Random], float], *, room: float = math.inf, dropped: float = 0.0) -> None:
        self.window = Window()
        self.latency_s = latency_s
        self.room = room
        """Most groups in generation."""
        self.dropped = dropped
        """Share of the groups that are filtered out."""
        self.random = Random(1)
        self.num_leased = self.num_ready = self.num_handed = self.num_trained = 0
        self.ends: list[tuple[float, int]] = []
        """Of the groups in generation: when each ends, and its number."""
        self.done_at = math.inf
        """When the trainer is done with a group; infinite while it waits."""
        self.stalled_until = self.waited_s = 0.0
        self.widest = 0.0
        self.most_queued = 0
        self.leased_at: list[float] = []

    @property
    def now(self) -> float:
        return self.window.now

    def run(self, seconds: float) -> "Line":
        """Let so much time pass."""
        until = self.now + seconds
        while self.now < until:
            self._lease()
            self._hand()
            self.most_queued = max(self.most_queued, len(self.ends) + self.num_ready)
            at = min(self.done_at, self.ends[0][0] if self.ends else math.inf, until)
            self.waited_s += at - self.now if math.isinf(self.done_at) else 0.0
            self.window.pass_time(at, len(self.ends) + self.num_ready, self.num_ready, self.num_handed)
            if self.ends and self.ends[0][0] <= at:
                self._end(heapq.heappop(self.ends)[1])
            if self.done_at <= at:
                self._train()
        return self

    def stall(self, seconds: float) -> None:
        """No rollout generates for so long."""
        self.stalled_until = self.now + seconds
        self.ends = [(at + seconds, number) for at, number in self.ends]

    def _lease(self) -> None:
        places = 2 * PER_STEP if math.isinf(self.window.limit) else math.ceil(self.window.limit)
        while len(self.ends) + self.num_ready < places and len(self.ends) < self.room:
            begins = max(self.now, self.stalled_until)
            heapq.heappush(self.ends, (begins + self.latency_s(self.random), self.num_leased))
            self.window.lease(GroupId(0, self.num_leased))
            self.leased_at.append(self.now)
            self.num_leased += 1

    def _end(self, number: int) -> None:
        self.window.row_ready()
        self.window.end(GroupId(0, number))
        if self.random.random() < self.dropped:
            self.window.drop(GroupId(0, number))
        else:
            self.num_ready += 1

    def _hand(self) -> None:
        if math.isinf(self.done_at) and self.num_ready:
            self.num_ready -= 1
            self.num_handed += 1
            self.done_at = self.now + GROUP_S

    def _train(self) -> None:
        self.done_at = math.inf
        self.num_trained += 1
        if self.num_handed == PER_STEP:
            self.window.end_step(PER_STEP, PER_STEP * GROUP_S, self.waited_s)
            self.num_handed, self.waited_s = 0, 0.0
            self.widest = max(self.widest, self.window.limit)


def some_seconds(random: Random) -> float:
    """10 s on average, like lengths of responses."""
    return random.lognormvariate(math.log(10) - 0.32, 0.8)


def share_trained(line: Line, seconds: float) -> float:
    """The part of the next seconds for which the trainer works."""
    before = line.num_trained
    line.run(seconds)
    return (line.num_trained - before) * GROUP_S / seconds


def mean_of(alive: Sequence[float], ended: Sequence[float], before: Sequence[float] = ()) -> float:
    """L of lives of these ages, which were seen from the ages `before` on, or always."""
    ages = np.array([*alive, *ended])
    return mean_latency(np.array(before or [-math.inf] * len(ages)), ages, len(alive))


def test_the_mean_latency_is_that_of_kaplan_and_meier():
    assert mean_of([], []) == 0
    assert mean_of([5.0, 5.0], []) == 5, "groups that have not ended count as far as they are"
    # One more never ends: S = 1 up to 1, 4/5 up to 2, 4/5 x 2/3 from then on; the one of age 1.5 leaves without an end.
    assert mean_of([1.5, 4.0], [1.0, 2.0]) == pytest.approx(1 + 4 / 5 + 2 * 4 / 5 * 2 / 3)
    assert mean_of([1.0], [1.0]) == pytest.approx(1.0), "of one age, those that ended come first"


def test_a_group_counts_from_the_age_on_at_which_it_was_seen_first():
    # At age 1 only the second one was seen, at age 3 both.
    assert mean_of([4.0], [3.0], before=[2.0, -1.0]) == pytest.approx(3 + 2 / 3)
    assert mean_of([4.0], [1.0, 3.0], before=[2.0, 0.0, 2.5]) == pytest.approx(1 + 2 / 2 + 1 / 2 * 2 / 3)


def test_the_mean_latency_of_many_groups_is_their_mean_though_many_are_still_in_generation():
    random = Random(3)
    lives = [some_seconds(random) for _ in range(4000)]
    begins = [index * 0.1 for index in range(4000)]
    now, since = 400.0, 300.0
    seen = [(at, life) for at, life in zip(begins, lives, strict=True) if at + life > since]
    alive = [(now - at, since - at) for at, life in seen if at + life > now]
    ended = [(life, since - at) for at, life in seen if at + life <= now]
    ages, before = zip(*alive, *ended, strict=True)
    assert mean_of(ages[: len(alive)], ages[len(alive) :], before) == pytest.approx(10.0, rel=0.06)


def test_until_the_trainers_rate_and_the_latency_are_known_the_window_has_no_limit():
    window = Window()
    window.end_step(PER_STEP, PER_STEP * GROUP_S, 0.0)
    assert math.isinf(window.limit)
    line = Line(some_seconds)
    while not line.num_trained >= PER_STEP:
        assert math.isinf(line.window.limit)
        line.run(0.1)
    assert line.window.limit < math.inf


@pytest.mark.parametrize("stalled_s", [0.0, 100.0])
def test_a_slow_start_of_rollouts_does_not_make_the_window_wide(stalled_s: float):
    line = Line(lambda random: random.uniform(0.5, 1.5))
    line.stall(stalled_s)
    line.run(stalled_s + 10)
    assert line.widest <= 40, "one step is in generation"


def test_the_groups_in_generation_are_the_trainers_rate_times_the_time_of_a_group():
    line = Line(some_seconds).run(300)
    assert line.window.in_generation == pytest.approx(10 / GROUP_S, rel=0.15)
    assert line.window.limit >= line.window.in_generation + 3 * math.sqrt(line.window.in_generation) - 1
    assert share_trained(line, 300) > 0.98


def test_a_run_fills_within_two_latencies_and_not_at_once():
    line = Line(some_seconds).run(20)
    assert share_trained(line, 20) > 0.9
    begun = sorted(line.leased_at)
    assert max(sum(at <= t < at + 0.5 for t in begun) for at in begun if at > 0) <= 70, "not the whole window together"


def test_a_run_that_fills_does_not_wind_up():
    line = Line(some_seconds).run(200)
    assert line.widest <= 1.8 * 10 / GROUP_S


def test_where_rollouts_have_no_room_for_it_the_window_has_no_margin_beyond_what_is_needed():
    line = Line(some_seconds, room=40).run(300)
    assert line.window.limit <= max(line.window.in_generation, 1.25 * line.most_queued) and line.most_queued <= 45


def test_groups_that_are_filtered_out_are_generated_too():
    line = Line(some_seconds, dropped=0.5).run(400)
    assert line.window.in_generation == pytest.approx(2 * 10 / GROUP_S, rel=0.2)
    assert share_trained(line, 300) > 0.97


def steady() -> Line:
    """A line that has found its window."""
    line = Line(lambda random: 10 * random.uniform(0.8, 1.2)).run(200)
    assert share_trained(line, 50) > 0.98
    return line


def known(latency_s: float = 10.0) -> Window:
    """A window that has measured such latencies, and a step."""
    window = Window(now=1000.0, clock=1000.0, group_s=GROUP_S, num_measured=2, per_step=PER_STEP)
    window.raised_at, window.has_rows = -math.inf, True
    window.latency_s = latency_s
    window.limit = window.most_queued = 10 * PER_STEP
    window.end_step(PER_STEP, PER_STEP * GROUP_S, 0.0)
    assert window.in_generation == pytest.approx(latency_s / GROUP_S) and not window.margin
    return window


def end_step(window: Window, waited_s: float, ready: int = 0, queued: float = math.inf) -> None:
    """A step during which so many groups were ready at least, and the window was full or had so many groups."""
    num_queued = math.ceil(min(window.limit, queued))
    window.pass_time(window.now + PER_STEP * GROUP_S, num_queued, ready, 5)
    window.row_ready()
    if waited_s:
        window.pass_time(window.now + waited_s, num_queued, 0, 5)
        window.row_ready()
    window.end_step(PER_STEP, PER_STEP * GROUP_S, waited_s)


def test_a_step_that_starved_widens_a_full_window_by_the_time_that_was_lost_and_by_a_quarter_at_most():
    for waited_s, share in ((0.1, 0.1), (20.0, 0.25)):
        window = known()
        before = window.limit
        end_step(window, waited_s)
        assert window.starved_s == pytest.approx(waited_s)
        assert window.in_generation + window.margin == pytest.approx(before * (1 + share))


def test_the_window_widens_once_in_a_latency():
    window = known(30.0)
    end_step(window, 0.5)
    raised = window.margin
    for _ in range(4):
        end_step(window, 0.5)
    assert window.margin == raised
    window.clock += 30.0
    end_step(window, 0.5)
    assert window.margin > raised


def test_a_window_that_was_not_full_does_not_widen():
    window = known()
    before = window.margin
    end_step(window, 0.5, queued=window.limit - 5)
    assert window.starved_s == pytest.approx(0.5) and window.margin == before


def test_a_trainer_that_waits_beside_ready_groups_does_not_starve():
    window = known()
    before = window.margin
    window.pass_time(window.now + 10.0, math.ceil(window.limit), 20, 5)
    window.end_step(PER_STEP, 1.0, 9.0)
    assert window.starved_s == 0 and window.margin <= before


def test_groups_that_were_never_needed_leave_the_window_little_by_little():
    window = known()
    window.margin = 80.0
    end_step(window, 0.0, ready=20)
    assert window.margin == pytest.approx(80 - 0.3 * (20 - PER_STEP / 64))


def test_the_first_step_counts_for_the_rate_of_the_trainer_only_until_the_second_one_ends():
    window = Window()
    for busy_s, group_s in ((60.0, 6.0), (1.0, 0.1)):
        window.pass_time(window.now + busy_s, 20, 0, 5)
        window.end_step(PER_STEP, busy_s, 0.0)
        assert window.group_s == pytest.approx(group_s)
    window.end_step(PER_STEP, 2.0, 0.0)
    assert 0.1 < window.group_s <= 0.1 + 0.3 * 0.1


@pytest.mark.parametrize("stall_s", [60.0, 6000.0])
def test_a_stall_counts_for_no_latency_and_costs_little_staleness(stall_s: float):
    line = steady()
    before, latency_s = line.window.limit, line.window.latency_s
    line.stall(stall_s)
    line.run(stall_s + 2)
    assert line.window.latency_s == pytest.approx(latency_s, rel=0.15)
    line.widest = 0.0
    line.run(100)
    assert line.widest <= 1.4 * before
    assert line.window.limit <= 1.15 * before, "and the window is soon as it was"


def test_a_time_in_which_no_group_is_generated_is_no_stall():
    window = steady().window
    window.began.clear()
    window.pass_time(window.now + 600.0, 20, 20, 5)
    window.lease(GroupId(1, 0))
    window.pass_time(window.now + 10.0, 21, 20, 5)
    window.row_ready()
    window.end(GroupId(1, 0))
    assert window.ended[-1][1] == pytest.approx(10.0)


def test_the_step_in_which_a_run_starts_again_counts_for_nothing():
    window = steady().window
    before = window.group_s, window.margin, window.latency_s
    window.restart()
    assert not window.began, "no group is in generation any more"
    window.pass_time(window.now + 9.0, 0, 0, 5)
    window.end_step(PER_STEP, 9.0, 9.0)
    assert (window.group_s, window.margin, window.latency_s) == before


def test_the_clock_of_the_host_may_be_set_back_and_forward():
    line = steady()
    before = line.window.limit
    line.window.pass_time(line.now - 500, 60, 20, 5)
    line.window.pass_time(line.now + 2000, 60, 20, 5)
    line.window.row_ready()
    assert max(line.window.clock - at for at in line.window.began.values()) < 20
    assert line.window.limit == pytest.approx(before)


LEASED = GroupId(0, 0)


def state_with(*events: ev.Event) -> HubState:
    """A state in which a group of two samples began at 2 s, after these events."""
    state = HubState()
    apply(ev.Opened(t=1.0, epoch=1, samples_per_prompt=2), state)
    apply(ev.Leased(t=2.0, group=LEASED, samples=[0, 1], attempt=1, version=0, holder="r"), state)
    for event in events:
        apply(event, state)
    return state


def ready(t: float, sample: int) -> ev.RowReady:
    return ev.RowReady(t=t, row=LEASED.row(sample), units=["u#1"], version=0, num_tokens=1, reward=1.0)


def failed(t: float, sample: int) -> ev.RowFailed:
    return ev.RowFailed(t=t, row=LEASED.row(sample), reason="refused")


def test_a_group_ends_with_its_last_sample_and_counts_from_the_first_row_of_the_run_on():
    assert not state_with(ready(5.0, 0)).window.ended
    for last in (ready(9.0, 1), failed(9.0, 1)):
        window = state_with(ready(5.0, 0), last).window
        assert window.ended == [(0.0, 4.0)] and not window.began


def test_a_group_that_was_filtered_out_or_failed_was_generated_for_nothing():
    assert state_with(ready(5.0, 0), ready(9.0, 1), ev.GroupFiltered(t=9.0, group=LEASED)).window.num_dropped == 1
    assert state_with(failed(5.0, 0), failed(9.0, 1)).window.num_dropped == 1


@pytest.mark.parametrize(
    "event",
    [
        ev.Returned(t=6.0, group=LEASED, attempt=1, reason="dead"),
        ev.UnitLost(t=6.0, unit="u#1", reason="dead"),
        ev.RowsLost(t=6.0, rows=[LEASED.row(0)], attempts=[1], reason="lost"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_group_of_which_rows_came_back_or_were_lost_is_not_measured(event: ev.Event):
    state = state_with(ready(5.0, 0), event)
    assert not state.window.began
    wanted = state.groups[LEASED].samples(RowStatus.WANTED)
    apply(ev.Leased(t=7.0, group=LEASED, samples=wanted, attempt=2, version=0, holder="r"), state)
    assert len(wanted) == 1 and not state.window.began and not state.window.ended


def test_a_prompt_that_no_rollout_can_use_is_not_measured():
    window = state_with(ready(5.0, 0), ev.PromptDropped(t=6.0, group=LEASED, reason="too long")).window
    assert not window.began and not window.ended and not window.num_dropped


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
    window = known()
    end_step(window, 0.0)
    window.publish_s = 0.0
    window.pass_time(window.now + 0.5, 60, 20, 0)
    window.publish(steps_late=0)
    assert window.published_groups == pytest.approx(0.5 / GROUP_S)


def test_a_slow_reference_leaves_the_window_as_it_is():
    """A quarter as fast as the trainer: most groups wait for its columns, and the trainer waits too. More groups would only be older."""
    window = known()
    before = window.limit
    for _ in range(5):
        window.pass_time(window.now + 4.0, math.ceil(window.limit), 0, 5, 50)
        window.row_ready()
        window.end_step(PER_STEP, 1.0, 3.0)
    assert window.starved_s == 0 and window.limit == pytest.approx(before, rel=0.05)


def test_a_window_of_which_rollouts_that_drain_use_half_does_not_shrink_below_what_the_trainer_needs():
    line = Line(some_seconds).run(100)
    window = line.window
    needed = window.in_generation
    for _ in range(50):  # less than .9 of the window was under way in each step
        window.most_queued = round(needed / 2)
        window.peak = needed / 2
        window.end_step(PER_STEP, PER_STEP * GROUP_S, 0.0)
    assert not window.has_room and window.limit == pytest.approx(needed, rel=0.05)


def test_the_latency_is_equal_to_the_last_bit_on_each_processor():
    random = Random(7)
    ages = [random.lognormvariate(3, 1) for _ in range(300)]
    found = mean_of(ages[:100], ages[100:], [age * random.random() for age in ages])
    alive, last = 1.0, 0.0
    parts: list[float] = []
    begun = Random(7)
    assert [begun.lognormvariate(3, 1) for _ in range(300)] == ages
    before = [age * begun.random() for age in ages]
    ends = sorted(ages[100:])
    for end in ends:
        parts.append(alive * (end - last))
        num_seen = sum(age >= end for age in ages) - sum(first >= end for first in before)
        alive, last = alive * (1 - 1 / (1 + num_seen)), end
    parts.append(alive * (min(max(ages), 2 * last) - last))
    assert found == math.fsum(parts)


def test_after_steps_whose_groups_were_nearly_all_filtered_out_the_window_is_soon_as_long_as_before():
    line = Line(some_seconds).run(100)
    usual = line.window.limit
    line.dropped = 0.9
    line.run(200)
    assert line.window.limit > 3 * usual
    line.dropped = 0.0
    line.run(100)
    assert line.window.limit < 1.5 * usual


def test_a_latency_is_learned_though_all_groups_begin_and_end_together():
    line = Line(lambda random: 5 + 0.05 * random.random(), room=64).run(100)
    line.latency_s = lambda random: 60 + random.random()
    line.run(1500)
    assert line.window.latency_s > 30


def test_a_group_that_never_ends_does_not_widen_the_window_for_ever():
    line = Line(some_seconds).run(100)
    line.window.lease(GroupId(1, 0))
    usual = line.window.limit
    line.run(1000)
    assert line.window.limit < 1.3 * usual


def test_a_step_without_groups_is_not_measured():
    line = Line(some_seconds).run(100)
    usual = line.window.limit
    line.window.end_step(0, 1.0, 0.0)
    assert line.window.limit == usual
