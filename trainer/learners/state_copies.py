"""Copies of the training state in the host's memory, which outlive the trainer's process.

The supervisor of each actor rank creates the memory, and all incarnations of the rank inherit it. A trainer that is started
again continues from the newest step that all ranks hold whole. Two slots take turns, so a process that dies while it copies
leaves the copy before.

    copy_thread.py                        one copy, and how often one pays
    second_copies.py                      what is sent to another host
    copies_reader.py                      the copies from which a trainer continues, in memory or on the disk
    launch/processes/copies_writer.py     the supervisors of a run that fails write the copies to the run folder
    relay/weights/copies_on_disk.py       what is there then

Nothing of the state changes between two steps until the first update. So a thread copies meanwhile, and the update waits for it.
It does not wait while the thread still prepares the memory, which takes minutes for a large state. The copies are as frequent as
their cost allows (`Pace`). Whatever goes wrong with them, training continues without.
"""

import os
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...comm.disk import say
from ...comm.environment import LACKS_MEMORY, SECOND_FD, SEGMENT_FD
from ...comm.fleet import Fleet
from ...comm.host_memory import free_bytes, held_by, memory_bytes
from ...comm.shared_memory import Segment
from ...comm.waits import waiting
from ...relay.weights.copies_on_disk import CopiesOnDisk
from ...relay.weights.partners import partners
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..checkpoint import TrainingState
from .copies_reader import FoundCopy, newest_in_memory, newest_on_disk
from .copy_thread import CopyThread, Pace
from .second_copies import SecondCopies
from .state_layout import StateLayout

if TYPE_CHECKING:
    from ..actor_group import ActorGroup

NUM_COPIES = 2
FREE_SHARE = 0.1
"""The share of the host's memory that has to stay free beside the copies."""
FIGURES: tuple[str, ...] = ("checkpoint/memory_s", "checkpoint/memory_stall_s")
_DEADLINE_S = 300.0
"""Of a copy, which takes seconds. One that takes longer than this or `comm.deadline_s` is given up."""
_PREPARATION_S = 1.0
"""How long an update waits for memory that is being prepared. It is enough for a small state."""


class _Use(Enum):
    """Whether copies are made."""

    ON = auto()
    FAILED = auto()
    """This rank makes no more; the others learn of it after the step."""
    OFF = auto()
    """All ranks do without."""
    FREED = auto()
    """Their memory is given back, too."""


class StateCopies:
    """The copies of one rank."""

    def __init__(
        self,
        segment: Segment,
        state: TrainingState,
        group: "ActorGroup",
        num_here: int = 1,
        on_disk: CopiesOnDisk | None = None,
        second: SecondCopies | None = None,
    ) -> None:
        """`num_here`: the actor ranks of this host, which all take such memory. `on_disk`: what earlier starts have left.

        second: where a rank of another host keeps a second copy, on all ranks or on none.
        """
        self.pace = Pace(torch.get_num_threads())
        self._slots = VersionSlots(segment, NUM_COPIES)
        self._state = state
        self._group = group
        self._num_here = num_here
        self._on_disk = on_disk
        self._second = second
        self.source = ""
        """Where the copy is that `newest` has found, for the console."""
        self._found: FoundCopy | None = None
        """This copy."""
        self._deadline_s = min(_DEADLINE_S, group.deadline_s)
        self._use = _Use.ON
        self._copy: CopyThread | None = None
        """The last copy that was begun. One that was given up may still prepare the memory."""
        self._is_awaited = False
        """Whether `finish` has to wait for it."""
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        self._newest = -1
        """The step of the last copy that was begun."""
        self._updated = -1
        """The step in which the state was changed last."""
        self._has_checked = False
        """Whether this process has looked if there is room."""
        self._made: StoredVersion | None = None
        """The copy of the present state."""
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
            second = SecondCopies(Segment.inherited(SECOND_FD), found, team, group.deadline_s)
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
        self.finish()
        if self._use in (_Use.ON, _Use.FAILED):
            is_alone = self._second is None or self._second.is_off
            mine = [self.pace.steps, self._has_to_wait, self._use is _Use.FAILED, not self._can_send, is_alone]
            every, has_to_wait, has_failed, is_unready, is_alone = self._group.all_reduce_max([*map(float, mine)])
            if is_alone:
                self._free_second()
            if has_failed:
                self._use = _Use.OFF
            elif not has_to_wait and self._state.step - self._newest >= every:
                self._begin(is_exchanged=not is_unready)
        if self._use is _Use.OFF and self._free():
            self._use = _Use.FREED

    def before_update(self) -> None:
        """Wait for the copy in progress, since the state is about to change."""
        self.finish()
        self._made = None
        self._updated = self._state.step

    def finish(self) -> None:
        """Wait for the copy in progress. It is given up if it takes too long, or if its memory is not there yet."""
        if self._copy is None:
            return
        copy = self._copy
        if self._is_awaited:
            self._is_awaited = False
            self._wait_for(copy)
        if copy.error:
            self._fail(copy.error)

    def end(self) -> None:
        """Take part in no more exchanges, and wait for none. An interrupted run has no time for them, and whatever it has not stored in a
        checkpoint is in the copies of its own supervisors.
        """
        self.finish()
        if self._second is not None:
            self._second.is_off = True

    def close(self) -> None:
        """Wait for the copy in progress, and close this process's opening of the memory."""
        self.end()
        if self._second is not None:
            self._second.close()
        self._slots.segment.close()

    def figures(self) -> dict[str, float]:
        """Metrics: seconds of a core and of waiting for the copies since the call before."""
        found = self._figures
        self._figures = dict.fromkeys(FIGURES, 0.0)
        return found

    def hold(self, copies: dict[int, Tensor]) -> tuple[dict[str, Any], StoredVersion] | None:
        """A copy of the present state that stays until it is released; None where this rank has none. A collective.

        There is none of a state within a step, which would be another one of the same number, and none once a rank has failed: it may
        have given its memory back already, so it would take part in no collective about it.

        copies: receives the copy of each tensor by the address of its bytes.
        """
        self._held.clear()
        if self._use in (_Use.OFF, _Use.FREED) or self._updated == self._state.step:
            return None
        self.finish()
        lacks_it = self._made is None
        if lacks_it and self._second is not None and not self._second.is_off:
            self._second.finish()
        # Once the copy before is on the other hosts: then all ranks have that step, here and there, until this one is there too.
        mine = [not lacks_it, not self._can_send, self._use is _Use.FAILED]
        some_have_it, is_unready, has_failed = self._group.all_reduce_max([*map(float, mine)])
        if has_failed:
            return None
        if lacks_it:
            self._begin(is_exchanged=not some_have_it and not is_unready)
            self.finish()
        if self._copy is None or self._made is None:
            return None
        self._held.add(self._made)
        return self._copy.layout.state_in(self._slots.segment.slot(self._made.slot), copies), self._made

    def release(self, held: StoredVersion) -> None:
        """Let a copy be overwritten that `hold` gave."""
        self._held.discard(held)

    @property
    def _is_at_work(self) -> bool:
        """Whether the thread of a copy that was given up is still at work."""
        return self._copy is not None and not self._copy.has_ended.is_set()

    @property
    def _can_send(self) -> bool:
        """Whether this rank is ready to send a copy. All ranks do so at once, so none of them may have to prepare its memory first."""
        is_free = self._copy is not None and self._copy.has_memory and not self._is_at_work
        return self._use is _Use.ON and is_free and self._second is not None and self._second.is_ready

    @property
    def _has_to_wait(self) -> bool:
        """Whether there is no slot to write. While the newest copy is sent, the other one is the newest that all ranks have there, too."""
        newest = self._slots.newest_stored()
        # The other copy is the newest, and is not given up for one that is not whole yet.
        is_full = newest is not None and any(held.slot != newest.slot for held in tuple(self._held))
        return is_full or self._is_at_work or (self._second is not None and self._second.is_sending)

    def _begin(self, *, is_exchanged: bool) -> None:
        """Begin a copy of the present state, if there is room. `is_exchanged`: all ranks are ready to send theirs on, and do."""
        started = time.monotonic()
        layout = StateLayout(self._state.state_dict())
        if not self._has_room(layout):
            return
        self._newest = self._state.step
        self._made = None
        if self._use is _Use.FAILED or self._is_at_work:
            return
        busy = {held.slot for held in tuple(self._held)}
        on_end: Callable[[StoredVersion | None], None] = lambda _: None
        if self._second is not None:
            busy |= self._second.sent
            on_end = partial(self._send, self._second) if is_exchanged else on_end
        self._copy = CopyThread(self._slots, layout, self._newest, busy, self._stream, on_end)
        self._is_awaited = True
        self._copy.start()
        self._begin_s = time.monotonic() - started

    def _send(self, second: SecondCopies, stored: StoredVersion | None) -> None:
        """In the copy's thread: send it to a rank on another host, or the news that there is none, and receive that of another rank."""
        second.begin(stored, np.empty(0, np.uint8) if stored is None else self._slots.segment.slot(stored.slot))

    def _wait_for(self, copy: CopyThread) -> None:
        started = time.monotonic()
        with waiting("memory", "the copy of the training state", self._deadline_s) as wait:
            is_prepared = copy.is_prepared.wait(min(_PREPARATION_S, wait.remaining_s))
            prepared_at = time.monotonic()
            if is_prepared:
                copy.has_ended.wait(wait.remaining_s)
        copy.give_up()
        ended = time.monotonic()
        self._made = copy.stored
        # Gloo's own threads send and receive. They take at most one core for so long.
        sent_s = 0.0 if self._second is None else self._second.take_seconds()
        cpu_s = self._begin_s + copy.cpu_s + sent_s
        if copy.stored is not None:
            # What is done once per process says nothing about the copies that follow.
            self.pace.add_copy(cpu_s, self._begin_s + ended - prepared_at)
        elif is_prepared and not copy.has_ended.is_set():
            self._fail(f"one has taken longer than {self._deadline_s:.0f} s")
        for name, seconds in zip(FIGURES, (cpu_s, self._begin_s + ended - started), strict=True):
            self._figures[name] += seconds

    def _has_room(self, layout: StateLayout) -> bool:
        """Whether all ranks' hosts have the memory. Each process looks once, after its first step; a collective.

        This is between two steps, when processes hold little. Each rank may need as much again as it has held at its peak.
        """
        if not self._has_checked:
            self._has_checked = True
            process = held_by(os.getpid())
            growth = process.most_resident - process.resident
            free = free_bytes() - FREE_SHARE * memory_bytes()
            own = both = NUM_COPIES * layout.num_bytes - self._slots.segment.held_bytes + growth
            if self._second is not None:
                self._second.meet(self._group, layout)
                both += NUM_COPIES * self._second.num_bytes - self._second.held_bytes
            lacking = [wanted * self._num_here - free for wanted in (own, both)]
            most, most_of_both = self._group.all_reduce_max(lacking)
            if most > 0:
                self._use = _Use.OFF
            if self._second is not None and most_of_both > 0:
                self._free_second()
                if self._group.is_lead:
                    say(
                        f"a host lacks {most_of_both / 1e9:.1f} GB of memory for copies of another host's training state: if a host"
                        " of an actor dies, the resumed run trains the steps since its last checkpoint again"
                    )
            elif self._second is not None:
                self._second.prepare()
            if most > 0 and self._group.is_lead:
                say(
                    f"a host lacks {most / 1e9:.1f} GB of memory for copies of the training state: if the trainer dies, it trains"
                    " the steps since its last checkpoint again"
                )
        return self._use is not _Use.OFF

    def _fail(self, why: str) -> None:
        if self._use is _Use.ON:
            self._use = _Use.FAILED
            say(f"no more copies of the training state are made in memory: {why}")

    def _free(self) -> bool:
        """Give the memory back, once no thread uses it. Whether it is given back."""
        self.finish()
        self._free_second()
        if self._held or self._is_at_work or self._second is not None:
            return False
        self._made = None
        _give_back(self._slots.free)
        return True

    def _free_second(self) -> None:
        """Take part in no more exchanges, and give the memory of another host's copies back, once no thread uses it."""
        if self._second is not None:
            self._second.is_off = True
            if not (self._is_at_work or self._second.is_at_work):  # the one may start the other at its end
                _give_back(self._second.free)
                self._second.close()
                self._second = None

    # ---------------------------------------------------------------------------------------------- after a restart

    def newest(self, most: int, checkpoint: int = -1) -> int:
        """The newest step up to `most` that all ranks hold whole, or -1; a collective. `restore` or `forget` follows.

        Without any in memory, those that an earlier start of the run has left in the run folder count, if they are newer than the
        checkpoint. Where they cannot be used, they are removed.
        """
        self.source = "the copy in memory"
        self._found = newest_in_memory(self._slots, self._state, self._group, most)
        if self._found is None and self._on_disk is not None:
            self.source = "the copy in the run folder"
            self._found = newest_on_disk(self._on_disk, self._state, self._group, checkpoint, most)
            if self._found is None and self._group.is_lead:
                self._on_disk.remove(range(most + 1))
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
        if self._use is not _Use.ON:
            self._free()


def _give_back(free: Callable[[], None]) -> None:
    try:
        free()
    except OSError as error:
        say(f"the memory of the copies of the training state is not given back: {error}")
