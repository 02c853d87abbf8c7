"""The five schedules: who may start a trajectory, and when a batch may be trained. `run.schedule` chooses.

| schedule | a trajectory is begun | a group is handed out |
|---|---|---|
| sync | for the step in progress, on its version | when the whole batch is complete |
| one_step | batch n+1 on version n, once batch n is complete and version n published | when the whole batch is complete |
| stream | as in one_step | as soon as it is complete |
| partial, headrace | while the queue has room (see `admission`) | as soon as it is complete |

In the first three, batches do not overlap: all of one is generated before the next begins, which is a barrier for all rollouts.
"""

from dataclasses import dataclass

from ...comm.recipe import ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that differs from one schedule to another."""

    name: ScheduleName
    staleness: int | None = None
    """Its own bound on staleness; with one, a batch is a barrier for all rollouts. None leaves it to `queue.max_staleness`."""
    whole_batches: bool = False
    """A step's groups are handed out together, once they are all complete."""
    updates_mid_trajectory: bool = False
    """A rollout takes new weights at once, under its running trajectories; else when its own work has drained."""
    takes_share_at_once: bool = False
    """A rollout takes its share of a batch when the batch begins, however many trajectories it can run together."""
    repacks: bool = False
    """Long trajectories may move to another rollout."""
    broadcasts: bool = True
    """The trainer and all rollouts update together, by a broadcast that all take part in; else relays hold the versions."""


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="sync", staleness=0, whole_batches=True, takes_share_at_once=True),
        Schedule(name="one_step", staleness=1, whole_batches=True, takes_share_at_once=True),
        Schedule(name="stream", staleness=1, takes_share_at_once=True),
        Schedule(name="partial", updates_mid_trajectory=True),
        Schedule(name="headrace", repacks=True, broadcasts=False),
    )
}
