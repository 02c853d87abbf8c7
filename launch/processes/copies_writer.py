"""The copies of the training state that a failed run leaves in its folder. The supervisors of actors write them from their memory.

So the run that is resumed does not train the steps since its newest checkpoint again. Imports no torch.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

from ...comm.environment import SEGMENT_FD
from ...comm.errors import HeadraceError, SettingError
from ...comm.shared_memory import Segment
from ...relay.checkpoints import CheckpointFolder
from ...relay.weights.copies_on_disk import CopiesOnDisk, CopyHead
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..config.run_folder import start_in
from ..placement import Placement
from .child import print_message


class CopiesWriter:
    """The copies in the memory of an actor rank's supervisor, once its trainer has ended."""

    def __init__(self, run_dir: Path, placement: Placement, num_ranks: int, start: str) -> None:
        """`num_ranks`: all actor ranks; `start`: of `start_in`, when the run began."""
        self._run_dir = run_dir
        self._on_disk = CopiesOnDisk(run_dir)
        self._placement = placement
        self._num_ranks = num_ranks
        self._start = start

    def write(self, memories: Mapping[str, int], *, has_ended: bool) -> None:
        """Write the copies that are newer than the newest checkpoint.

        Of each rank the newest comes first. The one before is written too: another rank may lack the newest, or the journal its step.

        memories: their descriptors, by the variables that pass them on.
        has_ended: the trainer has ended in order, so its checkpoints count if they are whole. Else the journal has to have them.
        """
        if not self._start:
            return
        newest = self._newest_checkpoint(is_whole=has_ended)
        if has_ended and self._placement.index == 0 and self._is_same_start():
            with suppress(OSError, SettingError):  # of an earlier start; what stays costs room alone
                self._on_disk.remove(range(self._newest_checkpoint(is_whole=False) + 1))
        with ExitStack() as opened:
            found: list[_Left] = []
            for variable, memory in memories.items():
                segment = opened.enter_context(closing(Segment(os.dup(memory), "")))
                slots = VersionSlots(segment)
                is_own = variable == SEGMENT_FD
                found += [
                    _Left(is_own, stored, slots) for stored in slots.complete_versions() if stored.version > newest
                ]
            # A step counts with the copies of all ranks alone, so the newest of a rank that is gone comes before older ones.
            found.sort(key=lambda left: (-left.stored.version, not left.is_own))
            for number, left in enumerate(found):
                if not number and self._placement.index == 0:
                    print_message(
                        f"the actors write their copies of the training state after step {left.stored.version} to"
                        f" {self._on_disk.path(left.stored.version)} ({left.slots.segment.slot_bytes / 1e9:.1f} GB each);"
                        " run.resume=auto continues from there"
                    )
                try:
                    self._write(left)
                except (OSError, HeadraceError) as error:
                    print_message(
                        f"{self._placement.name}: a copy of the training state cannot be written to {self._on_disk.root}: {error};"
                        " without it run.resume=auto continues from an older one or from the newest checkpoint"
                    )

    def _write(self, left: "_Left") -> None:
        stored = left.stored
        rank = self._placement.index if left.is_own else stored.incarnation
        if self._is_same_start() and (left.is_own or self._is_lacking(stored.version, rank)):
            segment = left.slots.segment
            head = CopyHead(
                stored.version, stored.digest, left.slots.fingerprint, segment.slot_bytes, self._num_ranks, self._start
            )
            # The folder may have been prepared for another start meanwhile, which has trained these steps again.
            content = segment.slot(stored.slot)
            self._on_disk.write(rank, head, content, by=self._placement.name, is_wanted=self._is_same_start)

    def _is_same_start(self) -> bool:
        return start_in(self._run_dir) == self._start

    def _is_lacking(self, step: int, rank: int) -> bool:
        """Whether the supervisor of a rank has not written its copy itself in this start of the run."""
        head = self._on_disk.head(step, rank)
        return head is None or head.start != self._start

    def _newest_checkpoint(self, *, is_whole: bool) -> int:
        folder = CheckpointFolder(self._run_dir)
        return max(folder.whole(), default=0) if is_whole else folder.latest() or 0


class _Left(NamedTuple):
    """A copy in memory, of the rank itself or of one on another host."""

    is_own: bool
    stored: StoredVersion
    slots: VersionSlots
