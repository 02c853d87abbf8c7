"""Copies of the training state in the host's memory, which outlive the trainer's process.

The supervisor of each actor rank creates the memory, and all incarnations of the rank inherit it. A trainer that is started
again continues from the newest step that all ranks hold whole. Two slots take turns, so a process that dies while it copies
leaves the copy before. Where a run fails, the supervisors write the copies to the run folder, and the run that is resumed continues from
those (`relay/weights/copies_on_disk.py`).

Nothing of the state changes between two steps until the first update. So a thread copies meanwhile, and the update waits for it.
It does not wait while the thread still prepares the memory, which takes minutes for a large state. The copies are as frequent as
their cost allows (`Pace`). Whatever goes wrong with them, training continues without.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...comm import threads
from ...comm.disk import say
from ...comm.environment import LACKS_MEMORY, SECOND_FD, SEGMENT_FD
from ...comm.fleet import Fleet
from ...comm.host_memory import free_bytes, held_by, memory_bytes
from ...comm.shared_memory import Segment
from ...comm.trace import failpoint
from ...comm.waits import waiting
from ...relay.weights.partners import partners
from ...relay.weights.copies_on_disk import CopiesOnDisk
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..checkpoint import CHECKPOINT_PERIOD_S, TrainingState
from .copies_reader import FoundCopy, newest_of_all, saved_copies, whole_copies
from .second_copies import SecondCopies
from .state_layout import StateLayout

if TYPE_CHECKING:
    from ..actor_group import ActorGroup

NUM_COPIES = 2
COST_SHARE = 0.01
"""The largest share of the time that copies take: of the cores that a rank computes with, and of its training, which waits for them."""
FREE_SHARE = 0.1
"""The share of the host's memory that has to stay free beside the copies."""
FIGURES: tuple[str, ...] = ("checkpoint/memory_s", "checkpoint/memory_stall_s")
_DEADLINE_S = 300.0
"""Of a copy, which takes seconds. One that takes longer than this or `comm.deadline_s` is given up."""
_PREPARATION_S = 1.0
"""How long an update waits for memory that is being prepared. It is enough for a small state."""
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


class _Copy:
    """A copy that a thread makes. It counts only if it is whole before it is given up."""

    def __init__(
        self, layout: StateLayout, step: int, busy: tuple[int, ...] = (), *, is_exchanged: bool = False
    ) -> None:
        self.layout = layout
        self.step = step
        self.busy = busy
        """Slots that are not written."""
        self.is_exchanged = is_exchanged
        """All ranks make one, and their partners on other hosts receive it."""
        self.is_prepared = threading.Event()
        """The memory is there, or the thread has ended."""
        self.stored: StoredVersion | None = None
        """Set once it is whole, with its digest."""
        self.cpu_s = 0.0
        self._lock = threading.Lock()
        self._is_given_up = False

    def check(self) -> None:
        """Raise `_GivenUp` if it was given up."""
        if self._is_given_up:
            raise _GivenUp

    def give_up(self) -> None:
        """Have the thread end, unless the copy is whole."""
        with self._lock:
            self._is_given_up = self.stored is None

    def complete(self, written: StoredVersion, commit: Callable[[], None]) -> None:
        """Make it count by calling `commit`. Raises `_GivenUp` if it is too late."""
        with self._lock:
            self.check()
            commit()
            self.stored = written


class StateCopies:
    """The copies of one rank."""

    def __init__(
        self,
        segment: Segment,
        state: TrainingState,
        group: "ActorGroup",
        num_here: int = 1,
        saved: CopiesOnDisk | None = None,
        second: SecondCopies | None = None,
    ) -> None:
        """`num_here`: the actor ranks of this host, which all take such memory. `saved`: the copies that earlier starts have left.

        second: where a rank of another host keeps a second copy, on all ranks or on none.
        """
        self.pace = Pace(torch.get_num_threads())
        self._slots = VersionSlots(segment, NUM_COPIES)
        self._state = state
        self._group = group
        self._num_here = num_here
        self._saved = saved
        self._second = second
        self.source = ""
        """Where the copy is that `newest` has found, for the console."""
        self._found: FoundCopy | None = None
        """This copy."""
        self._deadline_s = min(_DEADLINE_S, group.deadline_s)
        self._copy: _Copy | None = None
        """The copy in progress."""
        self._thread: threading.Thread | None = None
        """Of the last copy. It may still prepare the memory for one that was given up, or send one to another host."""
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        self._is_off = False
        """All ranks do without."""
        self._has_failed = False
        """This rank makes no more copies; the others learn of it after the step."""
        self._is_freed = False
        self._has_prepared = False
        """This process has mapped and pinned the memory."""
        self._newest = -1
        """The step of the last copy that was begun."""
        self._has_checked = False
        """Whether this process has looked if there is room."""
        self._layout: StateLayout | None = None
        self._made: StoredVersion | None = None
        """The copy of the present state, and its layout."""
        self._held: set[StoredVersion] = set()
        """The copy that a checkpoint is written from, which stays as it is. Another thread may release it at any moment."""
        self._ended_at: float | None = None
        self._begin_s = 0.0
        self._figures = dict.fromkeys(FIGURES, 0.0)

    @staticmethod
    def of_supervisor(fleet: Fleet, state: TrainingState, group: "ActorGroup", run_dir: Path) -> "StateCopies | None":
        """Copies in the memory that this process's supervisor has passed on; None without. A collective."""
        if SEGMENT_FD not in os.environ:
            return None
        hosts = [member.host for member in sorted(fleet.members("actor"), key=lambda member: member.index)]
        second = None
        found = partners(group.rank, hosts) if len(hosts) == group.size else None
        # All ranks have the memory or none: their supervisors know the hosts too.
        is_possible = found is not None and SECOND_FD in os.environ
        if not group.all_reduce_max([float(not is_possible)])[0]:
            team = group.clone_for_thread()
            assert found is not None and team is not None
            second = SecondCopies(Segment.inherited(SECOND_FD), found, team)
        num_here = max(1, hosts.count(fleet.me.host))
        copies = StateCopies(Segment.inherited(), state, group, num_here, CopiesOnDisk(run_dir), second)
        if LACKS_MEMORY in os.environ:
            copies._fail("the kernel has killed the process before for memory")
        return copies

    # ------------------------------------------------------------------------------------------ while training goes on

    def after_step(self) -> None:
        """Begin a copy if one is due; a collective, between two steps."""
        now = time.monotonic()
        if self._ended_at is not None:
            self.pace.add_step(now - self._ended_at)
        self._ended_at = now
        if not self._is_off:
            newest = self._slots.newest_stored()
            # The other copy is the newest, and is not given up for one that is not whole yet.
            is_full = newest is not None and any(held.slot != newest.slot for held in tuple(self._held))
            has_to_wait = is_full or self._is_at_work
            is_alone = self._second is None or self._second.is_off
            mine = [self.pace.steps, has_to_wait, self._has_failed, not self._has_prepared, is_alone]
            every, has_to_wait, has_failed, is_unprepared, is_alone = self._group.all_reduce_max([*map(float, mine)])
            self._is_off = bool(has_failed)
            if is_alone and not has_to_wait:
                self._free_second()
            if not self._is_off and not has_to_wait and self._state.step - self._newest >= every:
                self._begin(is_exchanged=not is_unprepared and not is_alone)
        if self._is_off:
            self._free()

    def before_update(self) -> None:
        """Wait for the copy in progress, since the state is about to change."""
        self.finish()
        self._made = None

    def finish(self) -> None:
        """Wait for the copy in progress. It is given up if it takes too long, or if its memory is not there yet."""
        if self._copy is None or self._thread is None:
            return
        copy, self._copy = self._copy, None
        started = time.monotonic()
        with waiting("memory", "the copy of the training state", self._deadline_s) as wait:
            is_prepared = copy.is_prepared.wait(min(_PREPARATION_S, wait.remaining_s))
            prepared_at = time.monotonic()
            if is_prepared:
                self._thread.join(wait.remaining_s)
        copy.give_up()
        ended = time.monotonic()
        self._made = copy.stored
        if copy.stored is not None:
            # What is done once per process says nothing about the copies that follow.
            self.pace.add_copy(self._begin_s + copy.cpu_s, self._begin_s + ended - prepared_at)
        elif is_prepared and self._thread.is_alive():
            self._fail(f"one has taken longer than {self._deadline_s:.0f} s")
        for name, seconds in zip(FIGURES, (self._begin_s + copy.cpu_s, self._begin_s + ended - started), strict=True):
            self._figures[name] += seconds

    def close(self) -> None:
        """Wait for the copy in progress, and close this process's opening of the memory."""
        self.finish()
        self._slots.segment.close()
        if self._second is not None:
            self._second.close()

    def figures(self) -> dict[str, float]:
        """Metrics: seconds of a core and of waiting for the copies since the call before."""
        found = self._figures
        self._figures = dict.fromkeys(FIGURES, 0.0)
        return found

    def hold(self, copies: dict[int, Tensor]) -> tuple[dict[str, Any], StoredVersion] | None:
        """A copy of the present state that stays until it is released; None where this rank has none. A collective.

        copies: receives the copy of each tensor by the address of its bytes.
        """
        self._held.clear()
        if self._is_off:
            return None
        self.finish()
        if self._made is None:
            self._begin(is_exchanged=False)  # a checkpoint on the disk is worth more than a copy on another host
            self.finish()
        if self._layout is None or self._made is None:
            return None
        self._held.add(self._made)
        return self._layout.state_in(self._slots.segment.slot(self._made.slot), copies), self._made

    def release(self, held: StoredVersion) -> None:
        """Let a copy be overwritten that `hold` gave."""
        self._held.discard(held)

    @property
    def _is_at_work(self) -> bool:
        """Whether the thread of a copy that was given up is still at work."""
        return self._copy is None and self._thread is not None and self._thread.is_alive()

    def _begin(self, *, is_exchanged: bool) -> None:
        """Begin a copy of the present state, if there is room. `is_exchanged`: all ranks do, in memory that is prepared, and send it on."""
        self.finish()
        started = time.monotonic()
        layout = StateLayout(self._state.state_dict())
        if not self._has_room(layout.num_bytes):
            return
        self._newest = self._state.step
        self._made = None
        if self._has_failed or self._is_at_work:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._layout = layout
        busy = tuple(held.slot for held in tuple(self._held))
        self._copy = _Copy(layout, self._newest, busy, is_exchanged=is_exchanged)
        self._thread = threads.new_thread(partial(self._run, self._copy), "copy of the state")
        self._thread.start()
        self._begin_s = time.monotonic() - started

    def _has_room(self, num_bytes: int) -> bool:
        """Whether all ranks' hosts have the memory. Each process looks once, after its first step; a collective.

        This is between two steps, when processes hold little. Each rank may need as much again as it has held at its peak.
        """
        if not self._has_checked:
            self._has_checked = True
            process = held_by(os.getpid())
            growth = process.most_resident - process.resident
            free = free_bytes() - FREE_SHARE * memory_bytes()
            own = NUM_COPIES * num_bytes - self._slots.segment.held_bytes + growth
            # A rank of another host has about as many bytes.
            both = own if self._second is None else own + NUM_COPIES * num_bytes - self._second.held_bytes
            lacking = [wanted * self._num_here - free for wanted in (own, both)]
            most, most_of_both = self._group.all_reduce_max(lacking)
            self._is_off = most > 0
            if self._second is not None and most_of_both > 0:
                self._free_second()
                if self._group.is_lead:
                    say(
                        f"a host lacks {most_of_both / 1e9:.1f} GB of memory for copies of another host's training state: if a host"
                        " of an actor dies, the resumed run trains the steps since its last checkpoint again"
                    )
            if self._is_off and self._group.is_lead:
                say(
                    f"a host lacks {most / 1e9:.1f} GB of memory for copies of the training state: if the trainer dies, it trains"
                    " the steps since its last checkpoint again"
                )
        return not self._is_off

    def _fail(self, why: str) -> None:
        self._has_failed = True
        say(f"no more copies of the training state are made in memory: {why}")

    def _free(self) -> None:
        """Give the memory back, once no thread uses it."""
        self.finish()
        if self._is_freed or self._held or self._is_at_work:
            return
        self._is_freed = True
        self._made = None
        _give_back(self._slots.free)
        self._free_second()

    def _free_second(self) -> None:
        """Give the memory of another host's copies back, and take part in no more exchanges."""
        if self._second is not None:
            _give_back(self._second.free)
            self._second.close()
            self._second = None

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self, copy: _Copy) -> None:
        try:
            self._slots.prepare(copy.layout.num_bytes, copy.layout.fingerprint)
            if self._stream is not None:
                self._slots.pin()
            self._has_prepared = True
            copy.is_prepared.set()
            copy.check()
            started = time.thread_time()
            self._write(copy)
            copy.cpu_s = time.thread_time() - started
        except _GivenUp:
            pass
        except Exception as error:  # noqa: BLE001 - training continues without copies
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            copy.is_prepared.set()
        if copy.is_exchanged:
            self._exchange(copy)

    def _exchange(self, copy: _Copy) -> None:
        """Send the copy, or the news that there is none, to a rank on another host, and receive that of another rank."""
        assert self._second is not None
        stored = copy.stored
        content = np.empty(0, np.uint8) if stored is None else self._slots.segment.slot(stored.slot)
        # Gloo's own threads send and receive. They take at most one core for so long.
        copy.cpu_s += self._second.exchange(stored, copy.layout.fingerprint, content)

    def _write(self, copy: _Copy) -> None:
        write = self._slots.begin(copy.step, busy=copy.busy)
        if write is None:
            say(f"the training state after step {copy.step} is not copied in memory: another process reads the copies")
            return
        buffer = self._slots.segment.slot(write.slot)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                for leaf in copy.layout.leaves:
                    if leaf.tensor.is_cuda:
                        leaf.view(buffer).copy_(leaf.tensor, non_blocking=True)
            self._stream.synchronize()
        failpoint("copy", step=copy.step)
        written = write._replace(digest=copy.layout.write(buffer, copy.check))
        copy.complete(written, partial(self._slots.commit, write, written.digest))

    # ---------------------------------------------------------------------------------------------- after a restart

    def newest(self, most: int, checkpoint: int = -1) -> int:
        """The newest step up to `most` that all ranks hold whole, or -1; a collective. `restore` or `forget` follows.

        Without any in memory, those that an earlier start of the run has left in the run folder count, if they are newer than the
        checkpoint. Where they cannot be used, they are removed.
        """
        self.source = "the copy in memory"
        self._found = newest_of_all(self._group, whole_copies(self._slots, self._state, most))
        if self._found is None and self._saved is not None:
            self.source = "the copy in the run folder"
            left = saved_copies(self._saved, self._state, self._group, checkpoint, most)
            self._found = newest_of_all(self._group, left)
            if self._found is None and self._group.is_lead:
                self._saved.remove(range(most + 1))
        return -1 if self._found is None else self._found.step

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Continue from the copy of a step that `newest` found, and give up all others: they may be of another history."""
        found, self._found = self._found, None
        assert found is not None and found.step == step, f"no copy of step {step}"
        state = self._state.state_dict()
        for leaf in StateLayout(state).leaves:
            leaf.tensor.copy_(leaf.view(found.content))
        self._state.load_state_dict(state)
        self._newest = step
        self._keep(found)

    def forget(self) -> None:
        """Give up all copies, because the training continues from another state."""
        self._found = None
        self._keep(None)

    def _keep(self, found: FoundCopy | None) -> None:
        """Give up all copies in memory but the one that was found. Its step is of one history on all ranks, so the second copy is too."""
        stored = None if found is None else found.stored
        self._slots.keep(stored)
        if self._second is not None:
            self._second.keep(None if stored is None else stored.version)
        if self._has_failed:
            self._free()


def _give_back(free: Callable[[], None]) -> None:
    try:
        free()
    except OSError as error:
        say(f"the memory of the copies of the training state is not given back: {error}")
