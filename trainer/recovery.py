"""How the trainer recovers when its process was restarted or the run is resumed.

It loads the newest copy of the training state in memory, or of those that the start before has left in the run folder, the newest
checkpoint, or the initial weights, and trains the steps after it again from `rows/`, with the same batches in the same order. The hub says how many steps the run has trained; nothing is reported or published until then.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..comm import threads
from ..comm.errors import SettingError
from ..comm.mailbox import Mailbox
from ..comm.messages import RestartPoint, Stop, TrainBatch, TrainerStarted
from ..comm.waits import waiting
from ..relay.checkpoints import CheckpointFolder
from ..relay.queue.requester import POLL_S, REPEAT_S
from ..relay.queue.stream import RunStopped
from .learners.state_copies import StateCopies
from .step_log import StepReplay
from .step_metrics import StepMetrics

if TYPE_CHECKING:
    from .learners.base import Learner


def request_restart(mailbox: Mailbox, incarnation: int, deadline_s: float) -> RestartPoint:
    """Rank 0: report the restart of the trainer to the hub; returns how many steps the run has trained, and why the trainer restarted.

    Raises `RunStopped` if the run ends.
    """
    sent_at = -float("inf")
    with waiting("hub", "the number of trained steps", deadline_s) as wait:
        while True:
            wait.check()
            if threads.seconds() - sent_at >= REPEAT_S:
                sent_at = threads.seconds()
                mailbox.send("hub", TrainerStarted(incarnation))
            envelope = mailbox.receive(POLL_S)
            match envelope.message if envelope else None:
                case RestartPoint(incarnation=answered) as point if answered == incarnation:
                    return point
                case Stop(reason=reason):
                    raise RunStopped(reason)
                case _:  # an answer to an earlier incarnation
                    pass


class Restored(NamedTuple):
    """The state that a trainer begins with."""

    first_step: int
    """The step that the run continues with; those between the state and this one are trained again."""
    checkpoint: int
    """The step of the newest checkpoint, 0 without one."""
    source: str
    """Where the state comes from, for the console."""


def restore_newest(learner: "Learner", run_dir: Path, num_trained: int, *, is_checked: bool) -> Restored:
    """Load the newest state: a copy in memory or in `memory/`, or the newest checkpoint that the journal knows. A collective of all ranks.

    num_trained: of rank 0's `request_restart`, or -1 if the run begins with this process; other ranks pass -1. A copy may
    be of a step of which the hub has not heard; it is not used, since the next incarnation has to report that step.
    is_checked: `latest` names a checkpoint that was checked when the run was prepared. A restarted trainer skips
    a damaged one, and trains more steps again.
    """
    folder = CheckpointFolder(run_dir)
    group = learner.group
    asks = group.is_lead and num_trained >= 0
    latest = folder.latest() if asks else None
    checkpoint, num_trained = map(int, group.all_reduce_max([float(_step_of(latest)), float(num_trained)]))
    copies = copies_of(learner)
    copy = -1 if copies is None else copies.newest(num_trained, checkpoint)
    if copy < max(checkpoint, 0) and not is_checked:
        usable = folder.newest_usable() if asks else None  # reads whole checkpoints
        checkpoint = int(group.all_reduce_max([float(_step_of(usable))])[0])
    if copies is not None and copy >= max(checkpoint, 0):
        copies.restore(copy)
        source = f"{copies.source} of step {copy}"
    else:
        if copies is not None:
            copies.forget()
        if checkpoint >= 0:
            learner.restore(folder.path(checkpoint))
        source = f"the checkpoint of step {checkpoint}" if checkpoint >= 0 else "the initial weights"
    return Restored(max(learner.version, num_trained), max(checkpoint, 0), source)


def _step_of(checkpoint: int | None) -> int:
    return -1 if checkpoint is None else checkpoint


def copies_of(learner: "Learner") -> StateCopies | None:
    """The learner's copies of its state in memory: engines of users, and emulated ones, have none."""
    copies = getattr(learner, "copies", None)
    return copies if isinstance(copies, StateCopies) else None


def has_rows(learner: "Learner", run_dir: Path, step: int, run_id: str) -> bool:
    """Whether each rank of an earlier trainer of this run had written its rows of a step. A collective of all ranks.

    That trainer may have published the result before the hub learnt of the step. So the step must be trained from the same rows:
    rollouts would have other weights under the same version.
    """
    try:
        is_there = StepReplay(run_dir, step, learner.group.rank).run_id == run_id
    except SettingError:
        is_there = False
    return not learner.group.all_reduce_max([float(not is_there)])[0]


def train_again(
    learner: "Learner", run_dir: Path, step: int, num_parts: int = 1, num_shown: int = 0
) -> tuple[StepMetrics, dict[str, Any]]:
    """Train a step again from the rows in the run folder; returns its statistics and metrics. A collective of all ranks.

    Each micro-batch is trained in `num_parts` parts, for a GPU that has no memory for a whole one. Raises `SettingError` if the rows are missing, or if another number of ranks trained them.
    """
    saved = StepReplay(run_dir, step, learner.group.rank)
    stats = StepMetrics(num_shown)
    saved.check_ranks(learner.group.size)
    fleet_metrics: dict[str, float] = {}
    with saved.same_threads():
        for batch in saved.batches():
            learner.accumulate(batch.split(num_parts), stats)
            if isinstance(batch.row_batch, TrainBatch):
                fleet_metrics = batch.row_batch.metrics
        return stats, {**learner.step(stats), **stats.metrics(step), **fleet_metrics}


def stops(mailbox: Mailbox) -> bool:
    """Whether the hub has ended the run meanwhile. Other messages are dropped: they are for an earlier incarnation."""
    while (envelope := mailbox.receive(0)) is not None:
        if isinstance(envelope.message, Stop):
            return True
    return False


def micro_tokens(configured: int, num_memory_deaths: int) -> int:
    """Tokens of a micro-batch: `optimizer.micro_tokens`, halved for each time that the trainer died of a full GPU."""
    return max(1, configured >> num_memory_deaths)
