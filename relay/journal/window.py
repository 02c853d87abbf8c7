"""The window: how many groups to have under way so that the trainer never waits for one, and no more, for staleness.

With N places, generation and the trainer are a closed network of an infinite server and a single one. The trainer needs
a = mu L groups in generation (Little's law: mu its rate, L the time to generate a group), and it starves with Erlang's
probability B(N, a), which does not depend on the distribution of lengths. So N = a + margin.

L is the mean of Kaplan and Meier (1958) over the groups that were in generation lately: each counts for the ages at which it was seen,
though it has not ended, or began long before. So while a run fills, a grows as the groups in generation would if the trainer had always
worked: the queue fills at the trainer's rate, and no faster, since groups that all begin together also end together. Nor does it change
L that a trainer starves.

The margin is so many standard deviations of a Poisson number of mean a, or more, which is learned. A step that starved although the
window was full widens the window by the share of time that was lost, at most a quarter, and once in a latency: before that, groups that
were leased for the last widening have not come. A step that did not starve lowers the margin by a part of the ready groups that were
never needed. Where rollouts have no room for the window, the margin adds little to what is under way.

Time in which no row became ready for several times the usual time is a stall, and does not count for L, unless there is one stall
after the other. Nor does the time until the first row, in which rollouts also start, nor do groups of which rows came back or were lost.
"""

import math
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from ...comm.messages.base import GroupId

GAIN = 0.3
"""The part of a new measurement that counts, and of the spare groups that leave the margin."""
TOLERANCE = 0.005
"""The share of a step for which the trainer may starve before the window grows."""
_DEVIATIONS = 3.0
"""The least margin, in standard deviations of the groups in generation."""
_WIDEST_RAISE = 0.25
"""The share of the window by which it grows at most for a step that starved."""
_USED = 0.9
"""The share of the window that was under way where rollouts have room for all of it."""
_ROOM = 1.25
"""Times the most groups under way beyond which the margin does not widen the window where they have not."""
_GROWTH = 4.0
"""Times the most groups under way to which the window is bound: the first measurements may be of a faulty start."""
_SPARE = 1 / 64
"""The share of a step's groups that stays ready."""
_STALL = 4
"""Times the usual time of a group and a step without a row that becomes ready, after which generation counts as stalled."""
_STALLS = 4
"""Stalls in a row, after which such times are the usual ones: all groups may begin and end together."""
_APART = 2
"""Times the groups over which L is measured, which end between two stalls that are not in a row."""
_LONGEST = 2
"""Times the highest age at which a group ended, beyond which one that still lives says nothing about L: it may never end."""
_LEAST_SAMPLE = 64
"""Groups that ended, over which L is measured, where fewer are in generation."""
_LOOKS = 8
"""Measurements of L in the time in which as many groups end as it is measured over."""


@dataclass(slots=True)
class Window:
    """A fold over the times of events and the counts of groups between them; the seconds are the journal's."""

    limit: float = math.inf
    """N: groups to have in generation or ready; infinite until the trainer's rate is known."""
    group_s: float = 0.0
    """1 / mu: seconds that the trainer works on a group; 0 until it is known."""
    latency_s: float = 0.0
    """L: mean seconds from the lease of a group until it is generated."""
    margin: float = 0.0
    """The margin that was learned."""
    has_room: bool = True
    """Whether rollouts had room for the whole window lately."""
    step_s: float = 0.0
    """Seconds that the trainer works in a step; 0 until one was measured."""
    publish_s: float = 0.0
    """Seconds from the end of a step until its version is complete on a relay."""
    starved_s: float = 0.0
    """Seconds of the last step in which the trainer waited and no group was ready."""
    per_step: int = 0
    now: float = 0.0
    clock: float = 0.0
    """Seconds of generation until the last row became ready, without stalls."""
    silent_s: float = 0.0
    """Seconds of generation since then."""
    has_rows: bool = False
    """Whether a row has become ready since the start: rollouts start, too, before the first one."""
    num_stalls: int = 0
    """Stalls in a row."""
    num_since_stall: int = 0
    """Groups that have ended since the last one."""
    raised_at: float = 0.0
    """The clock when the margin was raised."""
    began: dict[GroupId, float] = field(default_factory=dict)
    """The groups in generation that are measured, by the clock at their lease."""
    ended: list[tuple[float, float]] = field(default_factory=list)
    """Of those that were generated: the clock at the lease, and the latency."""
    since: float = -math.inf
    """The clock from which on groups are measured."""
    num_ended: int = 0
    """Groups that were generated since L was measured."""
    num_measured: int = 0
    """Steps that were measured."""
    num_generated: float = 0.0
    """Groups that were generated lately; earlier ones fade."""
    num_dropped: float = 0.0
    """Those of them that were generated for nothing."""
    elapsed_s: float = 0.0
    """Seconds since the last step ended; the time by which a clock is set back is not taken off."""
    dry_s: float = 0.0
    """Seconds since then in which the step lacked groups and none was generated."""
    least_ready: float = math.inf
    most_queued: int = 0
    peak: float = 0.0
    """The most groups under way lately; higher ones fade."""
    is_full: bool = False
    """Whether the window has been full since the last step ended."""

    @property
    def starved_share(self) -> float:
        """The part of the last measured step for which the trainer starved, beside the usual time of its work."""
        seconds = self.starved_s + self.step_s
        return self.starved_s / seconds if seconds else 0.0

    @property
    def num_groups(self) -> int:
        """The limit as a whole number; 0 until it is known."""
        return 0 if math.isinf(self.limit) else math.ceil(self.limit)

    @property
    def published_groups(self) -> float:
        """Groups that the trainer works off while a version is published."""
        return self.per_step * self.publish_s / self.step_s if self.step_s else 0.0

    @property
    def in_generation(self) -> float:
        """a: groups in generation for a trainer that always works; 0 until its rate is known."""
        if not self.group_s:
            return 0.0
        num_kept = self.num_generated - self.num_dropped
        return self.latency_s / self.group_s * (self.num_generated + 1) / (num_kept + 1)

    @property
    def _sample(self) -> int:
        """Groups that ended, over which L is measured."""
        return max(len(self.began), _LEAST_SAMPLE)

    def open(self) -> None:
        """Begin after a start or a restart of the run: the step in progress has no measure, since the queue is empty."""
        self.per_step = 0
        self.starved_s = 0.0

    def restart(self) -> None:
        """No group is in generation any more."""
        self.began.clear()
        self.has_rows = False
        self.silent_s = 0.0
        self.open()

    def pass_time(
        self, now: float, num_queued: int, num_ready: int, num_in_training: int, num_at_tasks: int = 0
    ) -> None:
        """The counts have been these since the last call.

        num_at_tasks: groups that are generated and wait for another task's columns.
        """
        seconds = now - self.now
        self.now = now
        if seconds <= 0:
            return  # the wall clock was set back, or two events are of one moment
        self.elapsed_s += seconds
        self.silent_s += seconds
        if num_queued == num_ready + num_at_tasks:
            self.silent_s = 0.0  # nothing is generated
        self.least_ready = min(self.least_ready, num_ready)
        self.most_queued = max(self.most_queued, num_queued)
        if num_queued + 1 >= self.limit:
            self.is_full = True
        if not num_ready and not num_at_tasks and num_in_training < self.per_step:
            self.dry_s += seconds

    def lease(self, group: GroupId) -> None:
        """All samples of a group begin."""
        self.began[group] = self.clock + self.silent_s

    def row_ready(self) -> None:
        """A row became ready, or failed."""
        if self.has_rows and not self.silent_s:
            return  # no time has passed since the last one
        is_stall = 0 < _STALL * (self.latency_s + self.step_s) < self.silent_s and self.latency_s > 0
        if is_stall:
            self.num_stalls = self.num_stalls + 1 if self.num_since_stall <= _APART * self._sample else 1
            self.num_since_stall = 0
        if self.has_rows and (not is_stall or self.num_stalls > _STALLS):
            self.clock += self.silent_s
        else:
            self.began = {group: min(at, self.clock) for group, at in self.began.items()}
        self.has_rows = True
        self.silent_s = 0.0

    def end(self, group: GroupId) -> None:
        """A group is generated."""
        if (at := self.began.pop(group, None)) is None:
            return
        self.ended.append((at, self.clock - at))
        self._count()
        self.num_since_stall += 1
        self.num_ended += 1
        if self.num_ended * _LOOKS >= self._sample:
            self._measure()

    def forget(self, group: GroupId) -> None:
        """Rows of a group came back or were lost, or it was given up: its latency is not a usual one."""
        self.began.pop(group, None)

    def drop(self, group: GroupId) -> None:
        """A group was generated for nothing."""
        if self.began.pop(group, None) is not None:  # else it has ended before
            self._count()
        self.num_dropped = min(self.num_dropped + 1, self.num_generated)

    def _count(self) -> None:
        """One more group is generated."""
        kept = 1 - 1 / self._sample
        self.num_generated = kept * self.num_generated + 1
        self.num_dropped *= kept

    def end_step(self, num_groups: int, busy_s: float, waited_s: float) -> None:
        """A step of `num_groups` ended, in which the trainer worked and waited for so long; no work means not known."""
        gain = min(GAIN, num_groups / max(len(self.began), 1))
        self.peak = max(self.most_queued, self.peak + gain * (self.most_queued - self.peak))
        if busy_s > 0 and num_groups and (self.per_step or not self.num_measured):
            # The first step also starts the trainer, so the second one takes its place.
            self.group_s += (gain if self.num_measured > 1 else 1.0) * (busy_s / num_groups - self.group_s)
            self.step_s = self.group_s * num_groups
            self._learn(num_groups, busy_s, waited_s)
            self.num_measured += 1
        self.per_step = num_groups
        self.elapsed_s = self.dry_s = 0.0
        self.least_ready = math.inf
        self.most_queued = 0
        self.is_full = False

    def publish(self, steps_late: int) -> None:
        """A version is complete, the one of the last step or an earlier one."""
        if self.per_step:
            self.publish_s = _smoothed(self.publish_s, self.elapsed_s + steps_late * self.step_s)

    def _learn(self, num_groups: int, busy_s: float, waited_s: float) -> None:
        """Raise or lower the margin, if the window was known before the step."""
        was = self.limit
        self.has_room = math.isinf(was) or self.peak >= _USED * was
        self._choose()
        if math.isinf(was):
            return
        self.starved_s = min(waited_s, self.dry_s)
        if self.starved_s <= TOLERANCE * (busy_s + waited_s):
            self.margin = max(0.0, self.margin - GAIN * max(0.0, self.least_ready - _SPARE * num_groups))
        elif self.is_full and self.clock - self.raised_at >= self.latency_s:
            widened = was * (1 + min(self.starved_s / busy_s, _WIDEST_RAISE))
            self.margin = max(self.margin, widened - self.in_generation)
            self.raised_at = self.clock
        self._choose()

    def _measure(self) -> None:
        """Measure L over the groups that were in generation lately: since some of those that have ended were."""
        self.num_ended = 0
        num = self._sample
        for at, latency_s in self.ended[:-num]:
            self.since = max(self.since, at + latency_s)
        self.ended = self.ended[-num:]
        alive = np.fromiter(self.began.values(), float, len(self.began))
        at, latency_s = np.fromiter(chain.from_iterable(self.ended), float, 2 * len(self.ended)).reshape(-1, 2).T
        begins, ages = np.append(alive, at), np.append(self.clock - alive, latency_s)
        self.latency_s = mean_latency(self.since - begins, ages, len(self.began))
        self._choose()

    def _choose(self) -> None:
        """Set the limit by what was measured and learned."""
        if not (needed := self.in_generation):
            return
        wide = needed + max(_DEVIATIONS * math.sqrt(needed), self.margin)
        if not self.has_room:
            # Never below `needed`: rollouts that drain for a version have less under way than they will have.
            wide = max(needed, min(wide, _ROOM * self.peak))
        self.limit = min(wide, _GROWTH * self.peak) if self.peak else wide


def mean_latency(before_s: np.ndarray, ages_s: np.ndarray, num_alive: int) -> float:
    """The mean lifetime by the ends among lives that were seen from the age `before_s` on, until their age `ages_s`.

    The first `num_alive` have not ended. It is the integral of S(t) up to the highest age, or twice that of the last end, and S(t) is
    the product over the ends before t of 1 - 1/n, where n lives were seen at that age (Kaplan and Meier, 1958). One more is counted, which never ends: so the
    end of the only one that was seen at its age is not taken for that of all.
    """
    ends = np.sort(ages_s[num_alive:])
    num_older = len(ages_s) - np.searchsorted(np.sort(ages_s), ends)
    num_unseen = len(ages_s) - np.searchsorted(np.sort(before_s), ends, side="right")
    num_before = np.arange(len(ends)) - np.searchsorted(ends, ends)  # of the same age
    alive = np.cumprod(1 - 1 / (1 + num_older - num_unseen - num_before))
    longest = np.max(ages_s, initial=0.0)
    times = np.append(ends, min(longest, _LONGEST * ends[-1]) if len(ends) else longest)
    # Not a dot product, whose last digits depend on the processor: a replay has the same state everywhere.
    return math.fsum((np.append(1.0, alive) * np.diff(times, prepend=0.0)).tolist())


def _smoothed(before: float, measured: float) -> float:
    return before + GAIN * (measured - before) if before else measured
