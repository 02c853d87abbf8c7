"""Watches the progress of the run: gives alarms while nothing moves, and ends a run that can never train a step.

There are two reasons to end a run. Either many groups in a row ended without training, for example because the reward function
always raises. Their number decides, so a slow verifier does not end a run. Or nothing moves at all while the trainer waits for
groups; then only a long time decides. The counts are in the fold (`Losses`), so the hub's next process continues with them.
"""

from collections.abc import Callable

from ...comm.disk import say
from ...comm.recipe import QueueSettings
from .context import Handler, HubContext
from .dispatch import Dispatcher
from .telemetry import FleetStats

PATIENCE_S = 3600.0
"""Shortest time without any movement, while the trainer waits for groups, after which the run ends."""
FIRST_ALARM_S = 60.0
_ALARM_STEPS = 5
"""Usual times of a step without one after which the console says so; then after twice the time, and so on."""
_MIN_GROUPS = 64
"""Smallest number of useless groups in a row that ends a run: several small batches in a row may fail by chance."""
_FIRST_LINE = 10
"""Number of useless groups in a row after which the console says so; then after ten times as many, and so on."""
_LOST_ALARM = 4
"""Times the rows in flight that may be lost within a step before the console says so."""
_HOW_LONG = "the limit is four times the longest of comm.deadline_s, reward.timeout_s and environment.timeout_s, and at least an hour"
_TICK_S = 2.0
"""Longest time that counts between two checks: while the hub itself is blocked, such as by a full disk, the others are not slow."""


class Health(Handler):
    """Checks the losses after each message, and the time whenever the hub's loop calls `watch`.

    seconds: a clock. patience_s: see `PATIENCE_S`. takers: what has to ask for groups, for the alarms.
    """

    def __init__(
        self,
        context: HubContext,
        queue: QueueSettings,
        batch_groups: int,
        dispatcher: Dispatcher,
        fleet_stats: FleetStats,
        seconds: Callable[[], float],
        patience_s: float = PATIENCE_S,
        takers: str = "rollout",
    ) -> None:
        super().__init__(context)
        self.routes = {}
        self.dispatcher = dispatcher
        self.fleet_stats = fleet_stats
        self.seconds = seconds
        self.patience_s = patience_s
        self.takers = takers
        batches = queue.max_lost_batches
        self._most_in_vain = None if batches is None else max(batches * batch_groups, _MIN_GROUPS)
        """Number of useless groups in a row that ends the run; None sets no limit."""
        self._told_groups = 0
        self._in_vain = 0
        self._lost_step = -1
        self._lost_alarm = 0
        self._watched_at = seconds()
        self._step = self.state.step
        self._stepless_s = self._still_s = self._unmoved_s = 0.0
        self._next_alarm_s = 0.0
        self._alarm = ""
        """The last alarm that no step came."""
        self._mark: tuple[object, ...] = ()

    def advance(self) -> None:
        """Report the number of useless groups or lost rows whenever it has grown by much; end the run after too many groups."""
        losses = self.state.losses
        if losses.lost:
            self._look_at_lost()
        if losses.in_vain == self._in_vain:
            return
        self._in_vain = losses.in_vain
        groups = losses.in_vain // max(self.state.samples_per_prompt, 1)
        if groups < _FIRST_LINE:
            self._told_groups = 0
            return
        if self._has_complete_group():
            return
        if self._most_in_vain is not None and groups >= self._most_in_vain:
            self._end(
                f"none of the last {groups:,} groups can be trained, since step {self.state.step}: {self._losses()};"
                " queue.max_lost_batches allows more"
            )
        elif groups >= 10 * self._told_groups:
            self._told_groups = 10 ** (len(str(groups)) - 1)
            say(f"none of the last {groups:,} groups can be trained, since step {self.state.step}: {self._losses()}")

    def watch(self) -> None:
        """Count the time since the last step and since anything moved."""
        state = self.state
        now = self.seconds()
        passed_s = min(max(0.0, now - self._watched_at), _TICK_S)
        self._watched_at = now
        if state.step != self._step or not self._next_alarm_s:
            self._step = state.step
            self._stepless_s = 0.0
            if self.context.alarm == self._alarm:
                self.context.alarm = ""  # a step has come
            self._next_alarm_s = max(FIRST_ALARM_S, _ALARM_STEPS * state.losses.step_s)
        if (mark := self._progress()) != self._mark:
            self._mark = mark
            self._still_s = 0.0
            self._unmoved_s = 0.0
        else:
            self._unmoved_s += passed_s
            self._still_s += passed_s * self._may_end
        if not state.evaluations.num_leased or self._unmoved_s >= FIRST_ALARM_S:
            self._stepless_s += passed_s  # the time of an evaluation that moves does not count
        if self._still_s >= self.patience_s:
            self._end(
                f"nothing has moved for {self._still_s:,.0f} s: {self._who_waits()}; {self._losses()}; {_HOW_LONG}"
            )
        elif self._stepless_s >= self._next_alarm_s and state.step < self.dispatcher.admission.num_steps:
            self._next_alarm_s *= 2
            self.context.raise_alarm(f"no step for {self._stepless_s:,.0f} s: {self._losses()}; {self._who_waits()}")
            self._alarm = self.context.alarm

    def _end(self, reason: str) -> None:
        self.context.failure = self.context.failure or reason

    def _has_complete_group(self) -> bool:
        """Whether a group waits for the trainer, or for another task: then the run makes progress."""
        return bool(self.state.queue.ready) or any(group.is_complete for group in self.state.queued())

    def _look_at_lost(self) -> None:
        lost = self.state.losses.lost
        if self._lost_step != self.state.step:
            self._lost_step = self.state.step
            self._lost_alarm = _LOST_ALARM * self.state.in_flight
        if lost > self._lost_alarm:
            self._lost_alarm = 2 * lost
            self.context.raise_alarm(f"{lost} rows were lost after step {self.state.step}: {self.state.losses.loss}")

    @property
    def _may_end(self) -> bool:
        """Whether the rollouts have to make progress. A trainer at work may take any time, and a drained run waits for rollouts."""
        is_drained = self.state.drained and not self.state.held
        return self.dispatcher.trainer_waits and not is_drained and not self.context.awaits_queue

    def _progress(self) -> tuple[object, ...]:
        """A value that changes whenever any part of the run makes progress, even by a single token."""
        state = self.state
        losses = self.state.losses
        ends = (losses.finished, losses.failed, losses.filtered, losses.evicted)
        evaluations = state.evaluations
        done = (evaluations.evaluated, evaluations.failed, state.num_restored, self.fleet_stats.tokens)
        return (state.step, state.version, len(state.in_training), len(state.queue.ready), *ends, *done)

    def _losses(self) -> str:
        """The losses among the trajectories of this step, as text."""
        losses = self.state.losses
        parts = [
            f"{losses.failed:,} trajectories failed ({losses.failure})" if losses.failed else "no trajectory failed"
        ]
        if losses.filtered:
            parts.append(f"{losses.filtered:,} were filtered out (all rewards of a group are equal)")
        if losses.evicted:
            parts.append(f"{losses.evicted:,} were discarded")
        if losses.lost:
            parts.append(f"{losses.lost:,} were lost ({losses.loss})")
        return ", ".join(parts)

    def _who_waits(self) -> str:
        state = self.state
        if self.context.awaits_queue:
            return "the rows of the previous run are being read"
        if not self.dispatcher.trainer_waits:
            if state.version < 0 and not state.evaluations.num_leased:
                return "the trainer has not published the policy yet, which it loads first"
            return f"the trainer does not ask for groups; it has {len(state.in_training)} of this step"
        if state.evaluations.num_leased:
            return f"an evaluation is under way, with {state.evaluations.open} samples to go"
        if state.held:
            num_leased = sum(map(len, state.held.values()))
            return f"the trainer waits for groups, {num_leased} trajectories are with {', '.join(sorted(state.held))}"
        if num_ready := len(state.queue.ready):
            return f"the trainer waits for more groups (complete: {num_ready})"
        if self._has_complete_group():
            return "the trainer waits for groups, which wait for the tasks of the queue"
        return f"the trainer waits for groups, and no {self.takers} has any"
