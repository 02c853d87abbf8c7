"""The trainer's restart in place: its process died, and the next one continues where the run stands.

It loads the newest checkpoint, or the initial weights, and trains the steps after it again from `rows/`, with the same
batches in the same order. The hub says how many steps the run has trained; nothing is reported or published until then.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comm.mailbox import Mailbox
from ..comm.messages import RestartPoint, Stop, TrainBatch, TrainerStarted
from ..comm.waits import waiting
from ..relay.checkpoints import CheckpointFolder
from ..relay.queue.requester import POLL_S, REPEAT_S
from ..relay.queue.stream import RunStopped
from .step_log import StepReplay
from .step_stats import StepStats

if TYPE_CHECKING:
    from .learners.base import Learner


def request_restart(mailbox: Mailbox, incarnation: int, deadline_s: float) -> int:
    """Rank 0: tell the hub that the trainer runs again; returns the number of steps that the run has trained.

    Raises `RunStopped` if the run ends.
    """
    sent_at = -float("inf")
    with waiting("hub", "the number of trained steps", deadline_s) as wait:
        while True:
            wait.check()
            if time.monotonic() - sent_at >= REPEAT_S:
                sent_at = time.monotonic()
                mailbox.send("hub", TrainerStarted(incarnation))
            envelope = mailbox.receive(POLL_S)
            match envelope.message if envelope else None:
                case RestartPoint(incarnation=answered, step=step) if answered == incarnation:
                    return step
                case Stop(reason=reason):
                    raise RunStopped(reason)
                case _:  # an answer to an earlier incarnation
                    pass


def restore_newest(learner: "Learner", run_dir: Path, num_trained: int, *, is_resumed: bool) -> int:
    """Load the newest checkpoint that the journal knows; returns the step to continue with. A collective of all ranks.

    num_trained: rank 0's result of `request_restart`, or -1 if the run begins with this process; other ranks pass -1.
    A run that begins loads a checkpoint only if `is_resumed`: the one that was chosen and checked when it was prepared. A trainer
    that starts again passes over a damaged one, and trains more steps again.
    """
    folder, newest = CheckpointFolder(run_dir), None
    if learner.group.is_lead and num_trained >= 0:
        newest = folder.newest_usable()
    elif learner.group.is_lead and is_resumed:
        newest = folder.latest()
    found = learner.group.all_reduce_max([-1.0 if newest is None else float(newest), float(num_trained)])
    checkpoint, num_trained = map(int, found)
    if checkpoint >= 0:
        learner.restore(folder.path(checkpoint))
    return max(learner.version, num_trained)


def train_again(learner: "Learner", run_dir: Path, step: int) -> tuple[StepStats, dict[str, Any]]:
    """Train a step again from the rows in the run folder; returns its statistics and metrics. A collective of all ranks.

    Raises `SettingError` if the rows are missing, or if another number of ranks trained them.
    """
    saved, stats = StepReplay(run_dir, step, learner.group.rank), StepStats()
    saved.check_ranks(learner.group.size)
    fleet_metrics: dict[str, float] = {}
    for batch in saved.batches():
        learner.accumulate(batch, stats)
        if isinstance(batch.row_batch, TrainBatch):
            fleet_metrics = batch.row_batch.metrics
    return stats, {**learner.step(stats), **stats.metrics(step), **fleet_metrics}


def stops(mailbox: Mailbox) -> bool:
    """Whether the hub has ended the run meanwhile. Other messages are dropped: they are for an earlier incarnation."""
    while (envelope := mailbox.receive(0)) is not None:
        if isinstance(envelope.message, Stop):
            return True
    return False
