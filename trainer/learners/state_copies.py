"""Copies of the training state in the host's memory, which outlive the trainer's process.

The supervisor of each actor rank creates the memory, and all incarnations of the rank inherit it. A trainer that is started
again continues from the newest step that all ranks hold whole. Two slots take turns, so a process that dies while it copies
leaves the copy before. Where a run fails, the supervisors write the copies to the run folder, and the run that is resumed continues from
those (`relay/weights/saved_states.py`).

Nothing of the state changes between two steps until the first update. So a thread copies meanwhile, and the update waits for it.
The copies are as frequent as their cost allows (`Pace`).
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...comm import threads
from ...comm.disk import say
from ...comm.environment import SECOND_FD, SEGMENT_FD
from ...comm.errors import HeadraceError
from ...comm.fleet import Fleet
from ...comm.host_memory import free_bytes, memory_bytes
from ...comm.shared_memory import Segment
from ...comm.trace import failpoint
from ...comm.waits import waiting
from ...relay.weights.byte_ranges import join_digests
from ...relay.weights.partners import partners
from ...relay.weights.saved_states import SavedStates
from ...relay.weights.slots import StoredVersion, VersionSlots
from ..checkpoint import TrainingState, mapped
from .second_copies import SecondCopies

if TYPE_CHECKING:
    from ..actor_group import ActorGroup

NUM_COPIES = 2
COST_SHARE = 0.01
"""The largest share of the time that copies take: of the cores that a rank computes with, and of its training, which waits for them."""
FREE_SHARE = 0.1
"""The share of the host's memory that has to stay free beside the copies."""
FIGURES: tuple[str, ...] = ("checkpoint/memory_s", "checkpoint/memory_stall_s")
_PIECE_BYTES = 2 << 20
"""A piece is copied, then its digest is made while it is in the cache. The C library streams pieces of 1 MiB and more."""
_ALIGNMENT = 64
_DEADLINE_S = 300.0
"""Of a copy, which takes seconds."""
_REMEMBERED = 9
"""Copies and steps of which the medians are taken."""


class Pace:
    """The number of steps from one copy to the next, by the median costs of the last ones."""

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
        return max(1, math.ceil(median(self._costs) / (COST_SHARE * median(self._steps))))


class Leaf(NamedTuple):
    """A tensor of the state and its bytes in a slot."""

    tensor: Tensor
    start: int
    end: int

    def view(self, buffer: np.ndarray) -> Tensor:
        """Its place in a slot."""
        return torch.from_numpy(buffer[self.start : self.end]).view(self.tensor.dtype).reshape(self.tensor.shape)


class StateLayout:
    """The places of a state's tensors on this rank in a slot. A tensor with several names has one place."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.num_bytes = 0
        self.leaves: list[Leaf] = []
        """Each tensor once."""
        self._state = state
        self._named: dict[str, Leaf] = {}
        tensors: dict[str, Tensor] = {}
        mapped(state, lambda name, tensor: tensors.setdefault(name, tensor))
        starts: dict[tuple[int, int], int] = {}
        for name, tensor in sorted(tensors.items()):
            bytes_of_it = (tensor.data_ptr(), tensor.nbytes)
            is_new = bytes_of_it not in starts
            start = starts.setdefault(bytes_of_it, self.num_bytes)
            self._named[name] = Leaf(tensor, start, start + tensor.nbytes)
            if is_new:
                self.leaves.append(self._named[name])
                self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        lines = [
            f"{name} {leaf.tensor.dtype} {[*leaf.tensor.shape]} {leaf.start}" for name, leaf in self._named.items()
        ]
        self.fingerprint = xxhash.xxh3_64_intdigest("\n".join(lines).encode()) >> 1
        """63 bits over names, types, shapes and places."""

    def state_in(self, buffer: np.ndarray, copies: dict[int, Tensor]) -> dict[str, Any]:
        """The state with the tensors of a slot. `copies` receives each by the address of the bytes of which it is a copy."""

        def view(name: str, tensor: Tensor) -> Tensor:
            copies[tensor.data_ptr()] = copy = self._named[name].view(buffer)
            return copy

        return mapped(self._state, view)

    def digest(self, buffer: np.ndarray) -> str:
        """The digest of a slot, 32 hex digits."""
        return join_digests(digest for leaf in self.leaves for digest in _digests(buffer[leaf.start : leaf.end]))

    def write(self, buffer: np.ndarray) -> str:
        """Copy the tensors into a slot; returns its digest."""
        return join_digests(digest for leaf in self.leaves for digest in _copied(leaf, buffer[leaf.start : leaf.end]))


class StateCopies:
    """The copies of one rank."""

    def __init__(
        self,
        segment: Segment,
        state: TrainingState,
        group: "ActorGroup",
        num_here: int = 1,
        saved: SavedStates | None = None,
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
        self._found: np.ndarray | None = None
        """The bytes of this copy."""
        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        self._is_off = False
        """The memory is too small on a host, so all ranks do without."""
        self._has_failed = False
        """This rank makes no more copies; the others do not know."""
        self._newest = -1
        """The step of the last copy that was begun."""
        self._has_checked = False
        """Whether this process has looked if there is room."""
        self._layout: StateLayout | None = None
        self._made: StoredVersion | None = None
        """The copy of the present state, and its layout."""
        self._held: StoredVersion | None = None
        """The copy that a checkpoint is written from, which stays as it is."""
        self._ended_at: float | None = None
        self._begin_s = 0.0
        self._cpu_s = 0.0
        self._figures = dict.fromkeys(FIGURES, 0.0)

    @staticmethod
    def of_supervisor(fleet: Fleet, state: TrainingState, group: "ActorGroup", run_dir: Path) -> "StateCopies | None":
        """Copies in the memory that this process's supervisor has passed on; None without."""
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
        return StateCopies(Segment.inherited(), state, group, num_here, SavedStates(run_dir), second)

    # ------------------------------------------------------------------------------------------ while training goes on

    def after_step(self) -> None:
        """Begin a copy if one is due; a collective, between two steps."""
        now = time.monotonic()
        if self._ended_at is not None:
            self.pace.add_step(now - self._ended_at)
        self._ended_at = now
        if self._is_off:
            return
        newest = self._slots.newest_stored()
        # The other copy is the newest, and is not given up for one that is not whole yet.
        is_full = self._held is not None and newest is not None and newest.slot != self._held.slot
        every, is_full = self._group.all_reduce_max([float(self.pace.steps), float(is_full)])
        if not is_full and self._state.step - self._newest >= every:
            self._begin()

    def before_update(self) -> None:
        """Wait for the copy in progress, since the state is about to change."""
        self.finish()
        self._made = None

    def finish(self) -> None:
        """Wait for the copy in progress."""
        if self._thread is None:
            return
        started = time.monotonic()
        if self._thread.is_alive():
            with waiting("memory", "the copy of the training state", _DEADLINE_S) as wait:
                self._thread.join(wait.remaining_s)
                if self._thread.is_alive():
                    wait.check()
        self._thread = None
        stall_s = self._begin_s + time.monotonic() - started
        self.pace.add_copy(self._begin_s + self._cpu_s, stall_s)
        for name, seconds in zip(FIGURES, (self._begin_s + self._cpu_s, stall_s), strict=True):
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
        self._held = None
        if self._is_off:
            return None
        self.finish()
        if self._made is None and not self._has_failed:  # the other ranks begin none for the sake of this one
            self._begin()
            self.finish()
        if self._layout is None or self._made is None:
            return None
        self._held = self._made
        return self._layout.state_in(self._slots.segment.slot(self._made.slot), copies), self._made

    def release(self, held: StoredVersion) -> None:
        """Let a copy be overwritten that `hold` gave."""
        if self._held is held:
            self._held = None

    def _begin(self) -> None:
        """Begin a copy of the present state, if there is room."""
        self.finish()
        started = time.monotonic()
        self._layout = layout = StateLayout(self._state.state_dict())
        if not self._has_room(layout.num_bytes):
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._newest = self._state.step
        self._made = None
        self._thread = threads.new_thread(partial(self._copy, layout, self._newest), "copy of the state")
        self._thread.start()
        self._begin_s = time.monotonic() - started

    def _has_room(self, num_bytes: int) -> bool:
        """Whether all ranks' hosts have the memory, which is looked at once; a collective."""
        if not self._has_checked:
            self._has_checked = True
            wanted = 0 if self._slots.fingerprint else NUM_COPIES * num_bytes * self._num_here
            free = free_bytes() - FREE_SHARE * memory_bytes()
            lacking = [float(times * wanted - free) if wanted else 0.0 for times in (1, 2)]
            most, most_of_both = self._group.all_reduce_max(lacking)
            self._is_off = most > 0
            if self._second is not None and most_of_both > 0:
                self._second.close()
                self._second = None
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

    def _copy(self, layout: StateLayout, step: int) -> None:
        self._cpu_s = 0.0
        if not self._has_failed:
            try:
                self._slots.prepare(layout.num_bytes, layout.fingerprint)
                started = time.thread_time()
                self._made = self._write(layout, step)
                self._cpu_s = time.thread_time() - started
            except (OSError, ValueError, MemoryError, HeadraceError) as error:
                self._has_failed = True
                say(f"no more copies of the training state are made in memory: {error}")
        if self._second is not None:
            made = self._made
            buffer = np.empty(0, np.uint8) if made is None else self._slots.segment.slot(made.slot)
            # Gloo's own threads send and receive. They take at most one core for so long.
            self._cpu_s += self._second.exchange(made, layout.fingerprint, buffer)

    def _write(self, layout: StateLayout, step: int) -> StoredVersion | None:
        write = self._slots.begin(step, busy=() if self._held is None else (self._held.slot,))
        if write is None:
            return None
        buffer = self._slots.segment.slot(write.slot)
        if self._stream is not None:
            self._slots.pin()
            with torch.cuda.stream(self._stream):
                for leaf in layout.leaves:
                    if leaf.tensor.is_cuda:
                        leaf.view(buffer).copy_(leaf.tensor, non_blocking=True)
            self._stream.synchronize()
        failpoint("copy", step=step)
        written = write._replace(digest=layout.write(buffer))
        self._slots.commit(write, written.digest)
        return written

    # ---------------------------------------------------------------------------------------------- after a restart

    def newest(self, most: int, checkpoint: int = -1) -> int:
        """The newest step up to `most` that all ranks hold whole, or -1; a collective.

        Without any in memory, those that an earlier start of the run has left in the run folder count, if they are newer than the
        checkpoint. Where they cannot be used, they are removed.
        """
        self.source = "the copy in memory"
        newest = self._newest_of_all(dict(self._whole(most)))
        if newest < 0 and self._saved is not None:
            self.source = "the copy in the run folder"
            newest = self._newest_of_all(dict(self._left(checkpoint, most)))
            if newest < 0 and self._group.is_lead:
                self._saved.remove(range(most + 1))
        return newest

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Continue from the copy of a step that `newest` found."""
        assert self._found is not None, f"no copy of step {step}"
        state = self._state.state_dict()
        for leaf in StateLayout(state).leaves:
            leaf.tensor.copy_(leaf.view(self._found))
        self._found = None
        self._state.load_state_dict(state)
        self._newest = step

    def _newest_of_all(self, mine: dict[int, np.ndarray]) -> int:
        """The newest step of which all ranks have a copy, or -1, given this rank's; a collective."""
        newest = -int(self._group.all_reduce_max([-float(max(mine, default=-1))])[0])
        self._found = mine.get(newest)
        is_missing = self._group.all_reduce_max([float(newest not in mine)])[0]
        return -1 if is_missing else newest

    def _whole(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """The steps and the bytes of the copies up to this step that fit the state and have the digest with which they were written."""
        if not self._slots.fingerprint:
            return
        layout = StateLayout(self._state.state_dict())
        if layout.fingerprint != self._slots.fingerprint:
            say("the copies of the training state in memory are not used: they have other tensors")
            return
        for stored in self._slots.complete_versions():
            buffer = self._slots.segment.slot(stored.slot)
            if stored.version <= most and _has_digest(layout, buffer, stored.digest, stored.version):
                yield stored.version, buffer

    def _left(self, checkpoint: int, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """The same of the copies in the run folder that are newer than the checkpoint."""
        assert self._saved is not None
        rank = self._group.rank
        for step in self._saved.steps():
            if not checkpoint < step <= most or (head := self._saved.head(step, rank)) is None:
                continue
            layout = StateLayout(self._state.state_dict())
            if (head.fingerprint, head.num_ranks) != (layout.fingerprint, self._group.size):
                say(
                    f"the copy of the training state in {self._saved.file(step, rank)} is not used: it has other tensors"
                )
                continue
            try:
                buffer = self._saved.content(step, rank)
            except OSError as error:
                say(f"the copy of the training state in {self._saved.file(step, rank)} is not used: {error}")
                continue
            if _has_digest(layout, buffer, head.digest, step):
                yield step, buffer


def _has_digest(layout: StateLayout, buffer: np.ndarray, digest: str, step: int) -> bool:
    if layout.digest(buffer) == digest:
        return True
    say(f"the copy of the training state after step {step} is not used: its digest is another one")
    return False


def _digests(part: np.ndarray) -> Iterator[bytes]:
    for at in range(0, part.nbytes, _PIECE_BYTES):
        yield xxhash.xxh3_64_digest(part[at : at + _PIECE_BYTES].data)


def _copied(leaf: Leaf, into: np.ndarray) -> Iterator[bytes]:
    """Copy a tensor to its place, unless it comes from a GPU and is there; the digests of its pieces."""
    source = into if leaf.tensor.is_cuda else leaf.tensor.reshape(-1).view(torch.uint8).numpy()
    for at in range(0, into.nbytes, _PIECE_BYTES):
        piece = source[at : at + _PIECE_BYTES]
        if source is not into:
            into[at : at + _PIECE_BYTES] = piece
        yield xxhash.xxh3_64_digest(piece.data)
