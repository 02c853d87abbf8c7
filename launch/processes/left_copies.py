"""What the supervisor of an actor rank leaves of its memory when a run fails: the copies of the training state, in the run folder.

So the run that is resumed does not train the steps since its newest checkpoint again. Imports no torch.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ...comm.environment import SEGMENT_FD
from ...comm.errors import HeadraceError
from ...comm.shared_memory import Segment
from ...relay.checkpoints import CheckpointFolder
from ...relay.weights.saved_states import SavedStates, StateHead
from ...relay.weights.slots import VersionSlots
from ..config.run_folder import start_in
from ..placement import Placement
from .child import print_message


class LeftCopies:
    """The copies in the memory of an actor rank's supervisor, once its trainer has ended."""

    def __init__(self, run_dir: Path, placement: Placement, num_ranks: int, start: str) -> None:
        """`num_ranks`: all actor ranks; `start`: of `start_in`, when the run began."""
        self._run_dir = run_dir
        self._saved = SavedStates(run_dir)
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
        try:
            newest = self._newest_checkpoint(is_whole=has_ended)
            for variable in sorted(memories, reverse=True):  # the own copies first
                self._write_memory(memories[variable], newest, is_own=variable == SEGMENT_FD)
        except (OSError, HeadraceError) as error:
            print_message(
                f"{self._placement.name}: its copy of the training state cannot be written to {self._saved.root}: {error};"
                " run.resume=auto continues from the newest checkpoint"
            )

    def _write_memory(self, memory: int, newest: int, *, is_own: bool) -> None:
        with closing(Segment(os.dup(memory), "")) as segment:
            slots = VersionSlots(segment)
            left = [stored for stored in reversed(slots.complete_versions()) if stored.version > newest]
            if left and is_own and self._placement.index == 0:
                print_message(
                    f"the actors write their copies of the training state after step {left[0].version} to"
                    f" {self._saved.path(left[0].version)} ({segment.slot_bytes / 1e9:.1f} GB each); run.resume=auto continues"
                    " from there"
                )
            for stored in left:
                rank = self._placement.index if is_own else stored.incarnation
                if start_in(self._run_dir) == self._start and (is_own or self._is_lacking(stored.version, rank)):
                    head = StateHead(
                        stored.version,
                        stored.digest,
                        slots.fingerprint,
                        segment.slot_bytes,
                        self._num_ranks,
                        self._start,
                    )
                    self._saved.write(rank, head, segment.slot(stored.slot), by=self._placement.name)

    def _is_lacking(self, step: int, rank: int) -> bool:
        """Whether the supervisor of a rank has not written its copy itself in this start of the run."""
        head = self._saved.head(step, rank)
        return head is None or head.start != self._start

    def _newest_checkpoint(self, *, is_whole: bool) -> int:
        folder = CheckpointFolder(self._run_dir)
        return max(folder.whole(), default=0) if is_whole else folder.latest() or 0
