"""The second copy of each rank's training state, on another host, so that a host's death costs no more steps than a process's.

Each rank sends its copy to a rank of the next host, which keeps it in memory that its supervisor owns. If the run ends because a host
died, the supervisors that live write both (`launch/processes/copies_writer.py`).

A thread maps the memory, and for each copy one sends and receives while training goes on: nothing waits for them. The own copy that is
sent stays as it is until then.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import threads
from ...comm.disk import say
from ...comm.shared_memory import Segment
from ...comm.waits import waiting
from ...relay.weights.partners import Partners
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..actor_group import ThreadGroup
from ..checkpoint import CHECKPOINT_PERIOD_S
from .state_layout import StateLayout

if TYPE_CHECKING:
    from ..actor_group import ActorGroup

NUM_COPIES = 2
_PIECE_BYTES = 64 << 20
_DIGEST_BYTES = 16
_EXCHANGE_S = CHECKPOINT_PERIOD_S
"""Of a whole exchange. No rank makes another copy meanwhile, and copies are to be no rarer than checkpoints."""


class SecondCopies:
    """The exchange of one rank with its partners. Its threads' calls are the same on all ranks."""

    def __init__(self, segment: Segment, partners: Partners, team: ThreadGroup, deadline_s: float) -> None:
        """`deadline_s`: of a piece that is sent, and of a wait for an exchange."""
        self._slots = VersionSlots(segment, NUM_COPIES)
        self._partners = partners
        self._team = team
        self._deadline_s = deadline_s
        self.is_off = False
        """This rank takes part in no more exchanges."""
        self.sent: frozenset[int] = frozenset()
        """The slot of the own copy that is sent now; no one may write there."""
        self.num_bytes = 0
        """Of the partner's copy, once `meet` was called."""
        self._fingerprint = 0
        self._is_prepared = False
        self._thread: threading.Thread | None = None
        self._exchange_s = 0.0

    @property
    def is_at_work(self) -> bool:
        """Whether a thread uses the memory."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Whether this rank can take part in an exchange now."""
        return self._is_prepared and not self.is_off and not self.is_at_work

    @property
    def is_sending(self) -> bool:
        """Whether an exchange is under way, which reads the newest of the own copies."""
        return self._is_prepared and self.is_at_work

    @property
    def held_bytes(self) -> int:
        """Bytes of this host's memory that the copies of another one take."""
        return self._slots.segment.held_bytes

    def meet(self, group: "ActorGroup", layout: StateLayout) -> None:
        """Learn the size and layout of the partner's copies; a collective."""
        words = [0.0] * (2 * group.size)
        words[2 * group.rank : 2 * group.rank + 2] = [float(layout.num_bytes), float(layout.fingerprint)]
        found = group.all_reduce_max(words)
        self.num_bytes, self._fingerprint = map(int, found[2 * self._partners.kept :][:2])

    def prepare(self) -> None:
        """Have a thread map the memory, which takes minutes for a large state. Exchanges are for later."""

        def prepare() -> None:
            self._slots.prepare(self.num_bytes, self._fingerprint)
            self._is_prepared = True

        self._start(prepare, "memory of another host's copies")

    def begin(self, mine: StoredVersion | None, content: np.ndarray) -> None:
        """Have a thread send this rank's newest copy, None without one, and keep that of the partner; all ranks do, once they are ready.

        content: uint8 [num_bytes of the own copy], which no one changes until `sent` is empty. A failure ends the exchanges of this
        rank, and before the next one those of all (`StateCopies.after_step`).
        """
        self.sent = frozenset() if mine is None else frozenset([mine.slot])
        self._start(partial(self._exchange, mine, content), "second copy of the state")

    def take_seconds(self) -> float:
        """Seconds of exchanges since the call before."""
        found, self._exchange_s = self._exchange_s, 0.0
        return found

    def finish(self) -> None:
        """Wait for the exchange under way, until the deadline."""
        if self._thread is not None and self.is_sending:
            with waiting("other hosts", "the exchange of copies of the training state", self._deadline_s) as wait:
                self._thread.join(wait.remaining_s)

    def keep(self, step: int | None) -> None:
        """Give up all copies but that of a step; None gives up all."""
        self.finish()
        self._slots.keep(None if step is None else self._slots.find(step))

    def free(self) -> None:
        """Give up all copies, and give their memory back. Nothing is at work. Raises `OSError` if the kernel refuses."""
        self._slots.free()

    def close(self) -> None:
        """Close this process's opening of the memory. What an exchange under way receives is not readable then."""
        self._slots.segment.close()

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threads.new_thread(partial(self._run, work), name)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no room for another thread
            self._stop(error)
        else:
            self._thread = thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - training continues without them
            self._stop(error)
        self.sent = frozenset()

    def _stop(self, error: Exception) -> None:
        if not self.is_off:  # else a partner has ended first
            say(f"no more copies of the training state are sent to other hosts: {type(error).__name__}: {error}")
        self.is_off = True
        self.sent = frozenset()

    def _exchange(self, mine: StoredVersion | None, content: np.ndarray) -> None:
        started = time.monotonic()
        digest = bytes(_DIGEST_BYTES) if mine is None else bytes.fromhex(mine.digest)
        head = np.frombuffer(np.int64(-1 if mine is None else mine.version).tobytes() + digest, np.uint8).copy()
        theirs = np.empty_like(head)
        ends = started + _EXCHANGE_S
        self._swap(torch.from_numpy(head), torch.from_numpy(theirs), ends)
        version = int(theirs[:-_DIGEST_BYTES].view(np.int64)[0])
        sent = torch.from_numpy(content if mine is not None else content[:0])
        if version < 0:
            self._swap(sent, torch.empty(0, dtype=torch.uint8), ends)
        else:
            write = self._slots.begin(version, self._partners.kept)
            assert write is not None, "no one reads these slots"
            self._swap(sent, torch.from_numpy(self._slots.segment.slot(write.slot)), ends)
            self._slots.commit(write, theirs[-_DIGEST_BYTES:].tobytes().hex())
        self._exchange_s += time.monotonic() - started

    def _swap(self, sent: Tensor, received: Tensor, ends: float) -> None:
        """Send bytes to the one partner while those of the other arrive.

        ends: the time of the monotonic clock until which all may take. Raises `RuntimeError` if it, or a piece, takes too long.
        """
        group = self._team.process_group
        for at in range(0, max(len(sent), len(received)), _PIECE_BYTES):
            left_s = min(self._deadline_s, ends - time.monotonic())
            if left_s <= 0:
                raise RuntimeError(f"an exchange has taken longer than {_EXCHANGE_S:.0f} s")
            works: list[dist.Work | None] = []
            if at < len(sent):
                works.append(dist.isend(sent[at : at + _PIECE_BYTES], self._partners.keeper, group=group))
            if at < len(received):
                works.append(dist.irecv(received[at : at + _PIECE_BYTES], self._partners.kept, group=group))
            for work in works:
                assert work is not None
                work.wait(timedelta(seconds=left_s))
