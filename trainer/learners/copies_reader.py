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


def newest_in_memory(slots: VersionSlots, state: TrainingState, group: "ActorGroup", most: int) -> FoundCopy | None:
    """This rank's copy of the newest step up to `most` of which all ranks have one in memory; a collective."""
    whole = _whole_copies(slots, state, most)
    mine = next(whole, None)
    while True:
        step = -1 if mine is None else mine.step
        highest, lowest = group.all_reduce_max([float(step), -float(step)])
        if highest == -lowest:
            return mine
        if step > -lowest:
            mine = next(whole, None)


def newest_on_disk(
    on_disk: CopiesOnDisk, state: TrainingState, group: "ActorGroup", checkpoint: int, most: int
) -> FoundCopy | None:
    """The same of the copies in the run folder that are newer than the checkpoint. They are of one start of the run, as rank 0 sees.

    A copy takes minutes to read from a slow disk. Ranks read a piece each between two collectives, so that none of them waits for long.
    """
    while True:
        step = (on_disk.newest(checkpoint, most, group.size)[0] if group.is_lead else None) or -1
        step = int(group.all_reduce_max([float(step)])[0])
        if step < 0:
            return None
        found: list[FoundCopy] = []
        reading = _reading(on_disk, state, group.rank, step, found)
        is_reading = True
        while group.all_reduce_max([float(is_reading)])[0]:
            is_reading = next(reading, None) is not None
        if not group.all_reduce_max([float(not found)])[0]:
            return found[0]
        most = step - 1


def _whole_copies(slots: VersionSlots, state: TrainingState, most: int) -> Iterator[FoundCopy]:
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


def _reading(
    on_disk: CopiesOnDisk, state: TrainingState, rank: int, step: int, found: list[FoundCopy]
) -> Iterator[int]:
    """Read a rank's copy of a step, and add it to `found` if it can be used. Yields the size of each piece."""
    if (head := on_disk.head(step, rank)) is None:
        return
    layout = StateLayout(state.state_dict())
    if head.fingerprint != layout.fingerprint:
        say(f"the copy of the training state in {on_disk.file(step, rank)} is not used: it has other tensors")
        return
    content = np.empty(head.num_bytes, np.uint8)
    try:
        yield from on_disk.read(step, rank, content)
    except OSError as error:
        say(f"the copy of the training state in {on_disk.file(step, rank)} is not used: {error}")
        return
    if _has_digest(layout, content, head.digest, step):
        found.append(FoundCopy(step, content, None))


def _has_digest(layout: StateLayout, content: np.ndarray, digest: str, step: int) -> bool:
    if layout.digest(content) == digest:
        return True
    say(f"the copy of the training state after step {step} is not used: its digest is another one")
    return False
