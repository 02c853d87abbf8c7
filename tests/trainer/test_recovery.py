"""The state with which a restarted trainer begins: a copy in memory where it is as new as the newest checkpoint."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.closing import at_end

from headrace.comm.shared_memory import Segment
from headrace.relay.checkpoints import CheckpointFolder
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.checkpoint import TrainingState
from headrace.trainer.learners.base import Learner
from headrace.trainer.learners.state_copies import StateCopies
from headrace.trainer.recovery import copies_of, restore_newest


class FakeLearner:
    """A layer as the policy, with copies of its state; it notes the checkpoint that it loads."""

    def __init__(self, segment: Segment) -> None:
        layer = torch.nn.Linear(3, 3)
        self.group = ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=10)
        self.state = TrainingState(layer, torch.optim.AdamW(layer.parameters()))
        self.copies: Any = StateCopies(Segment.open(segment.path), self.state, self.group)
        at_end(self.copies.close)

    @property
    def version(self) -> int:
        return self.state.step

    def restore(self, folder: Path) -> None:
        self.state.step = int(folder.name.removeprefix("step_"))


@pytest.fixture
def segment() -> Segment:
    segment = Segment.create_anonymous("copies")
    at_end(segment.close)
    return segment


def test_a_checkpoint_is_read_only_where_it_is_newer_than_the_copy(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    dead, reads = FakeLearner(segment), list[int]()
    dead.state.step = 4
    dead.copies.after_step()
    dead.copies.finish()

    def newest_usable(self: CheckpointFolder) -> int:
        reads.append(1)
        return 6

    monkeypatch.setattr(CheckpointFolder, "newest_usable", newest_usable)
    for latest, source, num_reads in [
        (3, "the copy in memory of step 4", 0),
        (4, "the copy in memory of step 4", 0),
        (6, "the checkpoint of step 6", 1),
    ]:
        CheckpointFolder(tmp_path).set_latest(latest)
        restored = restore_newest(cast(Learner, FakeLearner(segment)), tmp_path, 7, is_checked=False)
        assert (restored.source, restored.first_step, len(reads)) == (source, 7, num_reads)
    assert FakeLearner(segment).copies.newest(9) == -1, "the copy is older than the state from which training continues"


def test_a_copy_counts_where_the_newest_checkpoint_is_damaged(tmp_path: Path, segment: Segment):
    dead = FakeLearner(segment)
    dead.state.step = 4
    dead.copies.after_step()
    dead.copies.finish()
    CheckpointFolder(tmp_path).set_latest(6)
    restored = restore_newest(cast(Learner, FakeLearner(segment)), tmp_path, 7, is_checked=False)
    assert (restored.source, restored.checkpoint) == ("the copy in memory of step 4", 0)


def test_what_a_users_learner_calls_its_copies_is_left_alone(segment: Segment):
    learner = FakeLearner(segment)
    learner.copies, ours = ["a user's own"], learner.copies
    assert copies_of(cast(Learner, learner)) is None
    learner.copies = ours
    assert copies_of(cast(Learner, learner)) is ours
