"""The copies of the training state from which a trainer can continue: in memory, or in the run folder.

`state_copies.py` says what they are for, and `relay/weights/copies_on_disk.py` how they come into the run folder.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...comm.disk import say
from ...relay.weights.copies_on_disk import CopiesOnDisk
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..checkpoint import TrainingState
from .state_layout import StateLayout

if TYPE_CHECKING:
    from ..actor_group import ActorGroup


class FoundCopy(NamedTuple):
    """A whole copy of this rank's state."""

    step: int
    content: np.ndarray
    """The bytes of its slot."""
    stored: StoredVersion | None
    """Its place in memory, None for a file's."""


def newest_of_all(group: "ActorGroup", whole: Iterator[FoundCopy]) -> FoundCopy | None:
    """This rank's copy of the newest step of which all ranks have one; a collective. `whole`: its copies from the newest on."""
    mine = next(whole, None)
    while True:
        step = -1 if mine is None else mine.step
        highest, lowest = group.all_reduce_max([float(step), -float(step)])
        if highest == -lowest:
            return mine
        if step > -lowest:
            mine = next(whole, None)


def whole_copies(slots: VersionSlots, state: TrainingState, most: int) -> Iterator[FoundCopy]:
    """The copies in memory up to step `most` that fit the state and have the digest with which they were written, from the newest on."""
    if not slots.fingerprint:
        return
    layout = StateLayout(state.state_dict())
    if layout.fingerprint != slots.fingerprint:
        say("the copies of the training state in memory are not used: they have other tensors")
        return
    for stored in reversed(slots.complete_versions()):
        if stored.version > most:
            continue
        content = slots.segment.slot(stored.slot)
        if _has_digest(layout, content, stored.digest, stored.version):
            yield FoundCopy(stored.version, content, stored)


def saved_copies(
    saved: CopiesOnDisk, state: TrainingState, group: "ActorGroup", checkpoint: int, most: int
) -> Iterator[FoundCopy]:
    """The same of this rank's copies in the run folder that are newer than the checkpoint."""
    for step in reversed(saved.steps()):
        if not checkpoint < step <= most or (head := saved.head(step, group.rank)) is None:
            continue
        file = saved.file(step, group.rank)
        layout = StateLayout(state.state_dict())
        if (head.fingerprint, head.num_ranks) != (layout.fingerprint, group.size):
            say(f"the copy of the training state in {file} is not used: it has other tensors")
            continue
        try:
            content = saved.content(step, group.rank)
        except OSError as error:
            say(f"the copy of the training state in {file} is not used: {error}")
            continue
        if _has_digest(layout, content, head.digest, step):
            yield FoundCopy(step, content, None)


def _has_digest(layout: StateLayout, content: np.ndarray, digest: str, step: int) -> bool:
    if layout.digest(content) == digest:
        return True
    say(f"the copy of the training state after step {step} is not used: its digest is another one")
    return False
