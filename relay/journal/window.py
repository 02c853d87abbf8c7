"""The window: how many groups to have under way so that the trainer never waits for one, and no more, for staleness.

With N places, generation and the trainer are a closed network of an infinite server and a single one. The trainer needs
a = mu L groups in generation (Little's law: mu its rate, L the time to generate a group), and it starves with Erlang's
probability B(N, a), which does not depend on the distribution of lengths. So N = a + margin. Over a step, a is the time that
groups spent in generation over the time that the trainer worked: groups that are filtered out count by themselves.

Groups that wait for another task, such as the reference, are generated: where that task is the slowest, a longer queue would only make
them older.

The margin is learned. A step that starved raises it by the groups that were missing, and the window that starved is kept as a
floor, which fades. A step that did not lowers it by a part of the ready groups that were never needed; the whole would swing,
since a group that is not leased now is missing only a generation later.

A step with a fault is not measured: leases came back from a dead holder, rows were lost, or no row became ready for several times the
usual time while some were generated, since no window would have kept the trainer busy. Nor is one during which rollouts work on an
evaluation, since its groups take longer than those of other steps. After a few such steps in a row they are the usual load, and are
measured too. After the first measurement a step adds a bounded number of groups, so that a fault which is not noticed
has little effect.
"""

import math
from dataclasses import dataclass

GAIN = 0.3
"""The part of a new measurement that counts, and of the spare groups that leave the margin."""
TOLERANCE = 0.005
"""The share of a step for which the trainer may starve before the window grows."""
_HEADROOM = 1.08
"""Factor by which the floor lies above a window that starved the trainer."""
_FADE = 0.99
"""Factor by which the floor shrinks with each step."""
_SPARE = 1 / 64
"""The share of a step's groups that stays ready."""
_PAUSE = 0.1
"""A step that stood still for longer than this share of itself is not measured, such as for a checkpoint."""
_STALL = 4
"""Times the usual time of a group and a step without a row that becomes ready, after which generation counts as stalled."""
_UNUSUAL_STEPS = 4
"""Most steps in a row that are not measured because of an evaluation or a fault."""
_GROWTH = 0.5
"""The part of the window by which it grows at most in a step, where that is more than the groups of the step."""


@dataclass(slots=True)
class Window:
    """A fold over the times of events and the counts of groups between them; the seconds are the journal's."""

    in_generation: float = 0.0
    """a: groups in generation for a trainer that always works."""
    margin: float = math.inf
    """Groups beyond them; infinite until a step was measured."""
    floor: float = 0.0
    step_s: float = 0.0
    """Seconds that the trainer works in a step."""
    latency_s: float = 0.0
    """Seconds that a group is generated."""
    publish_s: float = 0.0
    """Seconds from the end of a step until its version is complete on a relay."""
    starved_s: float = 0.0
    """Seconds of the last step in which the trainer waited and no group was ready."""
    per_step: int = 0
    now: float = 0.0
    elapsed_s: float = 0.0
    """Seconds since the last step ended; the time by which a clock is set back is not taken off."""
    group_s: float = 0.0
    """Seconds that groups spent in generation since then."""
    dry_s: float = 0.0
    """Seconds since then in which the step lacked groups and none was generated."""
    least_ready: float = math.inf
    most_queued: int = 0
    ready_at: float = math.inf
    """When a row became ready last, or when generation began again after it had no group; infinite until the first row."""
    silent_s: float = 0.0
    """Longest time without a row that became ready, of those that ended since the last step."""
    is_unusual: bool = False
    """Rollouts worked on an evaluation since then, or a process died with rows."""
    num_unusual: int = 0
    """Steps in a row, up to the last one, with that or with a stall."""

    @property
    def limit(self) -> float:
        """Groups to have in generation or ready; infinite until a step was measured."""
        return max(self.in_generation + self.margin, self.floor)

    @property
    def starved_share(self) -> float:
        """The part of the last measured step for which the trainer starved, beside the usual time of its work."""
        seconds = self.starved_s + self.step_s
        return self.starved_s / seconds if seconds else 0.0

    @property
    def num_groups(self) -> int:
        """The limit as a whole number; 0 until a step was measured."""
        return 0 if math.isinf(self.limit) else math.ceil(self.limit)

    @property
    def published_groups(self) -> float:
        """Groups that the trainer works off while a version is published."""
        return self.per_step * self.publish_s / self.step_s if self.step_s else 0.0

    def open(self) -> None:
        """Begin after a start or a restart of the run: the step in progress is not measured, since the queue is empty."""
        self.per_step = 0

    def pass_time(
        self,
        now: float,
        num_queued: int,
        num_ready: int,
        num_in_training: int,
        num_at_tasks: int = 0,
        *,
        evaluating: bool = False,
    ) -> None:
        """The counts have been these since the last call; `evaluating`: rollouts worked on an evaluation too.

        num_at_tasks: groups that are generated and wait for another task's columns.
        """
        seconds = now - self.now
        self.now = now
        if seconds <= 0:
            return  # the wall clock was set back, or two events are of one moment
        self.elapsed_s += seconds
        self.is_unusual |= evaluating
        num_in_generation = num_queued - num_ready - num_at_tasks
        if not num_in_generation and not math.isinf(self.ready_at):
            self.ready_at = now
        self.group_s += seconds * num_in_generation
        self.least_ready = min(self.least_ready, num_ready)
        self.most_queued = max(self.most_queued, num_queued)
        if not num_ready and not num_at_tasks and num_in_training < self.per_step:
            self.dry_s += seconds

    def end_step(self, num_groups: int, busy_s: float, waited_s: float) -> None:
        """A step of `num_groups` ended, in which the trainer worked and waited for so long; no work means not known."""
        self.num_unusual = self.num_unusual + 1 if self.is_unusual or self._has_stalled else 0
        is_whole = self.per_step > 0 and busy_s > 0 and not 0 < self.num_unusual <= _UNUSUAL_STEPS
        paused_s = self.elapsed_s - busy_s - waited_s
        if is_whole and paused_s <= _PAUSE * (busy_s + waited_s):
            self._learn(num_groups, busy_s, waited_s)
        self.per_step = num_groups
        self.is_unusual = False
        self.elapsed_s = self.group_s = self.dry_s = self.silent_s = 0.0
        self.least_ready = math.inf
        self.most_queued = 0

    def row_ready(self) -> None:
        """A row became ready, or failed."""
        self.silent_s = max(self.silent_s, self.now - self.ready_at)
        self.ready_at = self.now

    def disturb(self) -> None:
        """A process died, or its rows were lost: the step in progress is not a usual one."""
        self.is_unusual = True

    def publish(self, steps_late: int) -> None:
        """A version is complete, the one of the last step or an earlier one."""
        if self.per_step:
            self.publish_s = _smoothed(self.publish_s, self.elapsed_s + steps_late * self.step_s)

    @property
    def _has_stalled(self) -> bool:
        """Whether no row became ready for several times the usual time of a group and a step."""
        usual_s = self.latency_s + self.step_s
        return self.step_s > 0 and max(self.silent_s, self.now - self.ready_at) > _STALL * usual_s

    def _learn(self, num_groups: int, busy_s: float, waited_s: float) -> None:
        was = self.limit
        before = self.in_generation
        most = was + max(num_groups, _GROWTH * was)
        self.in_generation = min(_smoothed(before, self.group_s / busy_s), most)
        self.step_s = _smoothed(self.step_s, busy_s)
        self.latency_s = _smoothed(self.latency_s, self.group_s / num_groups)
        self.starved_s = min(waited_s, self.dry_s)
        if math.isinf(self.margin):
            self.margin = max(0.0, self.most_queued - self.in_generation)
            return
        self.floor *= _FADE
        if self.starved_s <= TOLERANCE * (busy_s + waited_s):
            self.margin = max(0.0, self.margin - GAIN * max(0.0, self.least_ready - _SPARE * num_groups))
        elif self.most_queued + 1 >= was:  # else the rollouts have no room for more
            self.margin = min(self.margin + self.starved_s * num_groups / busy_s, most - self.in_generation)
            self.floor = max(self.floor, _HEADROOM * was)


def _smoothed(before: float, measured: float) -> float:
    return before + GAIN * (measured - before) if before else measured
