"""The ranks of one tensor-parallel replica: how they join, how rank 0 sends calls, how they end together.

Rank 0 is a rollout of the fleet; the others are `shard`s. Their process group is the default group of each process. Rank 0
sends its calls as one JSON body per step, over Gloo, which wakes a rank that waits for a dead one.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ...comm.errors import PeerGone
from ...comm.fleet import Fleet, Member
from ...comm.links.meeting import meet
from ...comm.waits import waiting
from ...trainer.policy.tensor_parallel import TensorParallel
from .calls import Call, decode, encode

NO_TIMEOUT_S = 30 * 86400.0
"""Timeout of the process group. Rank 0 may be idle for long; the fleet, not a timeout, tells whether it is alive."""
_GROUP_TIMEOUT = timedelta(seconds=NO_TIMEOUT_S)
POLL_S = 0.2
"""Seconds between two checks of the other ranks' membership."""
_SMALL = 4096
"""Bytes of the first broadcast; a body that fits needs no second one."""


class TensorParallelGroup:
    """One rank of a replica. With `size` 1 there are no other ranks, and calls are not sent.

    group: of all ranks, for tensors on the host too. names: of the processes, by rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, names: Sequence[str], is_over: threading.Event | None = None
    ) -> None:
        self.group = group
        self.tensor_parallel = TensorParallel(group)
        self.size = self.tensor_parallel.size
        self._names = names
        self._queued: list[Call] = []
        self._is_over = is_over or threading.Event()

    @staticmethod
    def join(fleet: Fleet, tp: int, device: torch.device, deadline_s: float) -> "TensorParallelGroup":
        """Join the other ranks of this replica through the run's store; starts the thread that watches them."""
        if tp == 1:
            return TensorParallelGroup(None, [fleet.name])
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        fleet.announce(device=gpu)
        members, meeting = meet(fleet, _names(fleet.me, tp), deadline_s, having="device")
        names = [member.name for member in members]
        is_over = threading.Event()
        watch = threading.Thread(target=_watch, args=(fleet, members, is_over), name="replica watch", daemon=True)
        watch.start()
        with waiting(", ".join(names), "their process group", deadline_s), _naming(names):
            rank = names.index(fleet.name)
            backend = _backend([member.info["device"] for member in members])
            group = fleet.open_group(meeting, rank, tp, backend, deadline_s, _GROUP_TIMEOUT)
            return TensorParallelGroup(group, names, is_over)

    def enqueue(self, call: Call) -> None:
        """Rank 0: keep a call for the next `flush`."""
        if self.size > 1:
            self._queued.append(call)

    def flush(self) -> None:
        """Rank 0: send the queued calls to the other ranks."""
        if self.size > 1:
            calls = self._queued
            self._queued = []
            self._broadcast(encode(calls))

    def receive(self) -> list[Call]:
        """The other ranks: the calls of rank 0's next `flush`."""
        with waiting(self._names[0], "the next step", NO_TIMEOUT_S):
            return decode(self._broadcast())

    def all_agree(self, is_yes: bool) -> bool:
        """All ranks: whether every rank answers yes."""
        with self.collective():
            return bool(self.tensor_parallel.all_reduce_min(int(is_yes), torch.device("cpu")))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Wraps an operation of all ranks: an error of the group becomes `PeerGone` with their names."""
        with _naming(self._names):
            yield

    def close(self) -> None:
        """Stop watching the other ranks; from here on each rank ends alone."""
        self._is_over.set()
        if self.group is not None and dist.is_initialized() and self.group is dist.group.WORLD:
            dist.destroy_process_group()

    def _broadcast(self, body: bytes = b"") -> bytes:
        """Rank 0's body on all ranks."""
        framed = len(body).to_bytes(8, "little") + body
        head = self._shared(framed[:_SMALL].ljust(_SMALL, b"\0"))
        length = int.from_bytes(head[:8], "little")
        missing = length + 8 - _SMALL
        return head[8 : 8 + length] if missing <= 0 else head[8:] + self._shared(framed[_SMALL:].ljust(missing, b"\0"))

    def _shared(self, data: bytes) -> bytes:
        """Rank 0's bytes on all ranks; the other ranks pass as many bytes of any content."""
        assert self.group is not None
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self.collective():
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait(_GROUP_TIMEOUT)
        return tensor.numpy().tobytes()


def _names(me: Member, tp: int) -> list[str]:
    """The processes of this rank's replica, by rank."""
    others = tp - 1
    replica = me.index if me.role == "rollout" else me.index // others
    return [f"rollout-{replica}", *(f"shard-{replica * others + rank}" for rank in range(others))]


def _watch(fleet: Fleet, members: Sequence[Member], is_over: threading.Event) -> None:
    """Raise `PeerGone` in this thread, which ends the process, when a rank is gone: a replica restarts as a whole."""
    while not is_over.wait(POLL_S):
        present = {m.name: m.incarnation for m in fleet.members() if m.is_alive}
        for member in members:
            if present.get(member.name) != member.incarnation and not is_over.is_set():
                raise PeerGone(f"{member.name} of the replica {', '.join(m.name for m in members)} is gone")


@contextmanager
def _naming(names: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error) and "NCCL" not in str(error):
            raise
        raise PeerGone(f"one of {', '.join(names)} is gone: {str(error).splitlines()[0]}") from error


def _backend(devices: Sequence[str]) -> str:
    """NCCL if each rank has a GPU of its own; ranks that share a GPU communicate through the host."""
    has_own = all(devices) and len(set(devices)) == len(devices)
    return "cpu:gloo,cuda:nccl" if has_own else "cpu:gloo,cuda:gloo" if all(devices) else "gloo"
