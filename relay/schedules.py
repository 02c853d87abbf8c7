"""The five schedules: who may start a trajectory, and when a batch may be trained. `run.schedule` chooses.

| schedule | a trajectory is begun | a group is handed out |
|---|---|---|
| sync | for the step in progress, on its version | when the whole batch is complete |
| one_step | batch n+1 on version n, once batch n is complete and version n published | when the whole batch is complete |
| stream | as in one_step | as soon as it is complete |
| partial, headrace | while the queue has room (see `admission`) | as soon as it is complete |

In the first three, batches do not overlap: all of one is generated before the next begins, which is a barrier for all rollouts.
"""

from ..comm.recipe import BatchSettings, QueueSettings
from .admission import Admission
from .state import Group, HubState


class Synchronous(Admission):
    """Generate a batch, train it, update all: a bound of 0, and whole batches."""

    staleness = 0
    hands_out_whole_batches = True


class Stream(Admission):
    """Generation of the next batch overlaps training, which starts on the first complete group."""

    staleness = 1

    def may_lease(self, state: HubState, version: int, group: Group | None = None) -> bool:
        """For the step in progress while it lacks groups; for the next one once the batch before it is complete."""
        is_next = group is None and len(state.queued()) >= self.places(state)
        if is_next and (len(self.ready(state)) < self.places(state) or version != state.step):
            return False
        return super().may_lease(state, version, group)


class OneStep(Stream):
    """Generation of the next batch overlaps training; whole batches are handed out."""

    hands_out_whole_batches = True


SCHEDULES: dict[str, type[Admission]] = {
    "sync": Synchronous,
    "one_step": OneStep,
    "stream": Stream,
    "partial": Admission,
    "headrace": Admission,
}


def staleness_of(schedule: str) -> int | None:
    """The bound of a schedule that has one of its own; in those a batch is a barrier for all rollouts."""
    return SCHEDULES[schedule].staleness


def admission_of(schedule: str, batch: BatchSettings, queue: QueueSettings, num_steps: int) -> Admission:
    """The rules of a run."""
    return SCHEDULES[schedule](batch, queue, num_steps)
