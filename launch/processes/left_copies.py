"""What the supervisor of an actor rank leaves of its memory when a run fails: the copies of the training state, in the run folder.

So the run that is resumed does not train the steps since its newest checkpoint again. Imports no torch.
"""

import os
from contextlib import closing
from pathlib import Path

from ...comm.errors import HeadraceError
from ...comm.shared_memory import Segment
from ...relay.checkpoints import CheckpointFolder
from ...relay.weights.saved_states import SavedStates, StateHead
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..config.run_folder import start_in
from ..placement import Placement
from .child import print_message


class LeftCopies:
    """The copies in the memory of an actor rank's supervisor, once its trainer has ended."""

    def __init__(self, run_dir: Path, placement: Placement, num_ranks: int, start: str) -> None:
        """`num_ranks`: all actor ranks; `start`: of `start_in`, when the run began."""
        self._run_dir = run_dir
        self._placement = placement
        self._num_ranks = num_ranks
        self._start = start

    def write(self, memory: int, *, has_ended: bool) -> None:
        """Write the copies in the memory with this descriptor that are newer than the newest checkpoint.

        The newest comes first. The one before is written too: another rank may lack the newest, or the journal its step.
        has_ended: the trainer has ended in order, so its checkpoints count if they are whole. Else the journal has to have them.
        """
        if not self._start:
            return
        try:
            with closing(Segment(os.dup(memory), "")) as segment:
                slots = VersionSlots(segment)
                newest = self._newest_checkpoint(is_whole=has_ended)
                left = [stored for stored in reversed(slots.complete_versions()) if stored.version > newest]
                for stored in left:
                    if start_in(self._run_dir) == self._start:
                        self._write(slots, stored, is_told=stored is left[0])
        except (OSError, HeadraceError) as error:
            print_message(
                f"{self._placement.name}: its copy of the training state cannot be written to {SavedStates(self._run_dir).root}:"
                f" {error}; run.resume=auto continues from the newest checkpoint"
            )

    def _write(self, slots: VersionSlots, stored: StoredVersion, *, is_told: bool) -> None:
        saved = SavedStates(self._run_dir)
        content = slots.segment.slot(stored.slot)
        if is_told and self._placement.index == 0:
            print_message(
                f"the actors write their copies of the training state after step {stored.version} to"
                f" {saved.path(stored.version)} ({content.nbytes / 1e9:.1f} GB each); run.resume=auto continues from there"
            )
        head = StateHead(stored.version, stored.digest, slots.fingerprint, content.nbytes, self._num_ranks, self._start)
        saved.write(self._placement.index, head, content)

    def _newest_checkpoint(self, *, is_whole: bool) -> int:
        folder = CheckpointFolder(self._run_dir)
        return max(folder.whole(), default=0) if is_whole else folder.latest() or 0
