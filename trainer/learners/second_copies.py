"""The second copy of each rank's training state, on another host, so that a host's death costs no more steps than a process's.

Each rank sends its copy to a rank of the next host, which keeps it in memory that its supervisor owns. If the run ends because a host
died, the supervisors that live write both (`launch/processes/copies_writer.py`).
"""

import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.disk import say
from ...comm.shared_memory import Segment
from ...relay.weights.partners import Partners
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..actor_group import ThreadGroup

NUM_COPIES = 2
_DEADLINE_S = 30.0
"""Of an exchange. The update waits for it; what takes longer is not worth it, and the exchanges end."""
_PIECE_BYTES = 64 << 20
_DIGEST_BYTES = 16


class SecondCopies:
    """The exchange of one rank with its partners. Its threads' calls are the same on all ranks."""

    def __init__(self, segment: Segment, partners: Partners, team: ThreadGroup) -> None:
        self._slots = VersionSlots(segment, NUM_COPIES)
        self._partners = partners
        self._team = team
        self.is_off = False
        self._ends_at = 0.0

    def exchange(self, mine: StoredVersion | None, fingerprint: int, buffer: np.ndarray) -> float:
        """Send this rank's newest copy, None without one, and keep that of the partner; returns the seconds that it took.

        A failure ends the exchanges of this rank, and before the next ones those of all (`StateCopies.after_step`).
        """
        started = time.monotonic()
        if self.is_off:
            return 0.0
        self._ends_at = started + _DEADLINE_S
        try:
            self._exchange(mine, fingerprint, buffer)
        except Exception as error:  # noqa: BLE001 - training continues without them
            self.is_off = True
            say(f"no more copies of the training state are sent to other hosts: {type(error).__name__}: {error}")
        return time.monotonic() - started

    @property
    def held_bytes(self) -> int:
        """Bytes of this host's memory that the copies of another one take."""
        return self._slots.segment.held_bytes

    def keep(self, step: int | None) -> None:
        """Give up all copies but that of a step; None gives up all."""
        self._slots.keep(None if step is None else self._slots.find(step))

    def free(self) -> None:
        """Give up all copies, and give their memory back. Raises `OSError` if the kernel refuses."""
        self._slots.free()

    def close(self) -> None:
        self._slots.segment.close()

    def _exchange(self, mine: StoredVersion | None, fingerprint: int, buffer: np.ndarray) -> None:
        words = (-1, 0, 0) if mine is None else (mine.version, fingerprint, buffer.nbytes)
        digest = bytes(_DIGEST_BYTES) if mine is None else bytes.fromhex(mine.digest)
        head = np.frombuffer(np.array(words, np.int64).tobytes() + digest, np.uint8).copy()
        theirs = np.empty_like(head)
        self._swap(torch.from_numpy(head), torch.from_numpy(theirs))
        version, their_fingerprint, num_bytes = map(int, theirs[:-_DIGEST_BYTES].view(np.int64))
        sent = torch.from_numpy(buffer[: words[2]])
        if version < 0:
            self._swap(sent, torch.empty(0, dtype=torch.uint8))
            return
        self._slots.prepare(num_bytes, their_fingerprint)
        write = self._slots.begin(version, self._partners.kept)
        assert write is not None, "no one reads these slots"
        self._swap(sent, torch.from_numpy(self._slots.segment.slot(write.slot)))
        self._slots.commit(write, theirs[-_DIGEST_BYTES:].tobytes().hex())

    def _swap(self, sent: Tensor, received: Tensor) -> None:
        """Send bytes to the one partner while those of the other arrive. Raises `RuntimeError` after the deadline."""
        group = self._team.process_group
        for at in range(0, max(len(sent), len(received)), _PIECE_BYTES):
            works: list[dist.Work | None] = []
            if at < len(sent):
                works.append(dist.isend(sent[at : at + _PIECE_BYTES], self._partners.keeper, group=group))
            if at < len(received):
                works.append(dist.irecv(received[at : at + _PIECE_BYTES], self._partners.kept, group=group))
            for work in works:
                assert work is not None
                work.wait(timedelta(seconds=max(0.001, self._ends_at - time.monotonic())))
