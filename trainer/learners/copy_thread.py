"""One copy of the training state, which a thread writes into a slot of memory while training goes on; and how often that pays.

`state_copies.py` says what the copies are for, and decides when one is made.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from statistics import median

import torch

from ...comm import threads
from ...comm.disk import say
from ...comm.trace import failpoint
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..checkpoint import CHECKPOINT_PERIOD_S
from .state_layout import StateLayout

COST_SHARE = 0.01
"""The largest share of the time that copies take: of the cores that a rank computes with, and of its training, which waits for them."""
_REMEMBERED = 9
"""Copies and steps of which the medians are taken."""


class Pace:
    """The number of steps from one copy to the next, by the median costs of the last ones; no more than pass between two checkpoints."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def add_copy(self, cpu_s: float, stall_s: float) -> None:
        """A copy took so many seconds of a core, and kept the training from going on for so long."""
        self._costs.append(max(cpu_s / self._num_cores, stall_s))

    @property
    def steps(self) -> int:
        if not (self._steps and self._costs):
            return 1
        step_s = median(self._steps)
        affordable = math.ceil(median(self._costs) / (COST_SHARE * step_s))
        return max(1, min(affordable, int(CHECKPOINT_PERIOD_S / step_s)))


class _GivenUp(Exception):
    """The training did not wait for a copy any longer."""


class CopyThread:
    """A copy that a thread makes. It counts only if it is whole before it is given up."""

    def __init__(
        self,
        slots: VersionSlots,
        layout: StateLayout,
        step: int,
        busy: Collection[int] = (),
        stream: torch.cuda.Stream | None = None,
        on_end: Callable[[StoredVersion | None], None] = lambda _: None,
    ) -> None:
        """`busy` slots are not written. `stream`: for the copies of a state on a GPU, in memory that is pinned.

        on_end: receives the copy in the thread, None without one, before `has_ended` is set.
        """
        self.layout = layout
        self.is_prepared = threading.Event()
        """The memory is there, or the thread has ended."""
        self.has_ended = threading.Event()
        self.has_memory = False
        """This process has mapped and pinned the memory."""
        self.stored: StoredVersion | None = None
        """Set once it is whole, with its digest."""
        self.cpu_s = 0.0
        self.error = ""
        """Why no more copies should be made."""
        self._slots = slots
        self._step = step
        self._busy = busy
        self._stream = stream
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_given_up = False

    def start(self) -> None:
        """Begin to copy the state as the training's thread has left it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        try:
            threads.new_thread(self._run, "copy of the state").start()
        except RuntimeError as error:  # the system has no more threads
            self._fail(error)
            self._end()

    def give_up(self) -> None:
        """Have the thread end, unless the copy is whole."""
        with self._lock:
            self._is_given_up = self.stored is None

    def _run(self) -> None:
        try:
            self._slots.prepare(self.layout.num_bytes, self.layout.fingerprint)
            if self._stream is not None:
                self._slots.pin()
            self.has_memory = True
            self.is_prepared.set()
            self._check()
            started = time.thread_time()
            self._write()
            self.cpu_s = time.thread_time() - started
        except _GivenUp:
            pass
        except Exception as error:  # noqa: BLE001 - training continues without copies
            self._fail(error)
        self._end()

    def _fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"

    def _end(self) -> None:
        self.is_prepared.set()
        try:
            self._on_end(self.stored)
        finally:
            self.has_ended.set()

    def _write(self) -> None:
        write = self._slots.begin(self._step, busy=self._busy)
        if write is None:
            say(f"the training state after step {self._step} is not copied in memory: both copies are still read")
            return
        buffer = self._slots.segment.slot(write.slot)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                for leaf in self.layout.leaves:
                    if leaf.tensor.is_cuda:
                        leaf.view(buffer).copy_(leaf.tensor, non_blocking=True)
            self._stream.synchronize()
        failpoint("copy", step=self._step)
        written = write._replace(digest=self.layout.write(buffer, self._check))
        self._complete(written, partial(self._slots.commit, write, written.digest))

    def _check(self) -> None:
        """Raise `_GivenUp` if the copy was given up."""
        if self._is_given_up:
            raise _GivenUp

    def _complete(self, written: StoredVersion, commit: Callable[[], None]) -> None:
        """Make the copy count by calling `commit`. Raises `_GivenUp` if it is too late."""
        with self._lock:
            self._check()
            commit()
            self.stored = written
