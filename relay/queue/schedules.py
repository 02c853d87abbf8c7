"""The six schedules: when a trajectory may start, and when a batch may be trained. `run.schedule` chooses one.

| schedule | a trajectory starts | a group is handed out |
|---|---|---|
| sync | for the step in progress, on its version | when the whole batch is complete |
| stream_sync | as in sync | as soon as it is complete |
| one_step | batch n+1 on version n, once batch n is complete and version n published | when the whole batch is complete |
| stream | as in one_step | as soon as it is complete |
| partial, headrace | while the queue has room (see `admission`) | as soon as it is complete |

A trainer of several ranks gets complete groups once there is a micro-batch for each rank (`relay/hub/dispatch.py`).

In all but the last two, batches do not overlap: one is generated completely before the next starts, a barrier for all rollouts.
"""

import math
from dataclasses import dataclass, replace

from ...comm.recipe import RolloutSettings, RunSettings, ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The differences between schedules."""

    name: ScheduleName
    staleness: int | None = None
    """A fixed bound, with which a batch is a barrier for all rollouts; None leaves the bound to `queue.max_staleness`."""
    whole_batches: bool = False
    """Whether a step's groups are handed out together, once all are complete."""
    max_age: float = math.inf
    """Versions that a rollout's weights may be behind the newest. Beyond it takes the newest, and its running trajectories go on
    under them; with 0 at once. Until then it takes new weights once its trajectories have ended."""
    switches_if_starved: bool = False
    """Whether the hub orders a rollout to take the newest weights at once where the trainer starves for it (`relay/midway.py`)."""
    takes_share_at_once: bool = False
    """Whether a rollout takes its whole share of a batch at the start, even if it cannot run all of it together."""
    repacks: bool = False
    """Whether long trajectories may move to another rollout."""
    broadcasts: bool = True
    """Whether a published system of this schedule updates the trainer and all rollouts together, by a broadcast. Only the lab has
    such devices; this program's relays hold the versions of every schedule."""

    @property
    def mixes_versions(self) -> bool:
        """Whether any trajectory may continue on another version than it began on: there is no rule of one version."""
        return self.max_age < math.inf


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="sync", staleness=0, whole_batches=True, takes_share_at_once=True),
        Schedule(name="stream_sync", staleness=0, takes_share_at_once=True),
        Schedule(name="one_step", staleness=1, whole_batches=True, takes_share_at_once=True),
        Schedule(name="stream", staleness=1, takes_share_at_once=True),
        Schedule(name="partial", max_age=0),
        Schedule(name="headrace", switches_if_starved=True, repacks=True, broadcasts=False),
    )
}


def schedule_of(run: RunSettings, rollout: RolloutSettings) -> Schedule:
    """The schedule that `run.schedule` chooses, with `rollout.max_age`."""
    schedule = SCHEDULES[run.schedule]
    if rollout.max_age is None:
        return schedule
    if rollout.max_age == "never":
        return replace(schedule, switches_if_starved=False)
    return replace(schedule, max_age=rollout.max_age)
