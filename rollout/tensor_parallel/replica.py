"""The ranks of one tensor-parallel replica: how they meet, what rank 0 tells the others, how they live and die together.

Rank 0 is the rollout that the fleet knows; the others are `shard`s. Their process group is the default one of each process.
What rank 0 decides goes to the others as one JSON body per step, over Gloo, which wakes whoever waits for a dead rank.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ...comm.errors import PeerGone
from ...comm.fleet import Fleet, Member, StoreFleet
from ...comm.in_memory import MemoryFleet, MemoryNetwork
from ...comm.store import connect_store
from ...comm.waits import waiting
from ...trainer.policy.tensor_parallel import TensorParallel
from .calls import Call, decode, encode

NO_TIMEOUT_S = 30 * 86400.0
"""Rank 0 may have nothing to do for long; that it lives is what the fleet says."""
POLL_S = 0.2
"""How often a rank looks at the fleet for the others."""
_SMALL = 4096
"""Bytes of a body that needs one broadcast."""
_MEMORY_GROUPS: WeakKeyDictionary[MemoryNetwork, Any] = WeakKeyDictionary()


class TensorParallelGroup:
    """One rank's end. With `size` 1 there is nobody to tell.

    group: of all ranks, for tensors on the host too. whom: the name of each rank, by rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, whom: Sequence[str]) -> None:
        self.group = group
        self.tensor_parallel = TensorParallel(group)
        self.size = self.tensor_parallel.size
        self._whom = whom
        self._queued: list[Call] = []
        self._is_over = threading.Event()

    @staticmethod
    def join(fleet: Fleet, tp: int, device: torch.device, deadline_s: float) -> "TensorParallelGroup":
        """Meet the other ranks of this replica on the fleet's store."""
        if tp == 1:
            return TensorParallelGroup(None, [fleet.name])
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        fleet.announce(device=gpu)
        members, meeting = _meet(fleet, tp, deadline_s)
        names, is_over = [member.name for member in members], threading.Event()
        watch = threading.Thread(target=_watch, args=(fleet, members, is_over), name="replica watch", daemon=True)
        watch.start()
        with waiting(", ".join(names), "their process group", deadline_s), _naming(names):
            rank, backend = names.index(fleet.name), _backend([member.info["device"] for member in members])
            replica = TensorParallelGroup(_open_group(fleet, meeting, rank, tp, backend, deadline_s), names)
        replica._is_over = is_over
        return replica

    # ------------------------------------------------------------------------------------------------ rank 0

    def enqueue(self, call: Call) -> None:
        """Have the other ranks do the same before the next `flush`."""
        if self.size > 1:
            self._queued.append(call)

    def flush(self) -> None:
        """Send what was told; the others do it now."""
        if self.size > 1:
            told, self._queued = self._queued, []
            self._broadcast(encode(told))

    # ---------------------------------------------------------------------------------------- the other ranks

    def receive(self) -> list[Call]:
        """What rank 0 told, once it flushes."""
        with waiting(self._whom[0], "the next step", NO_TIMEOUT_S):
            return decode(self._broadcast())

    # ---------------------------------------------------------------------------------------------- all ranks

    def all_agree(self, word: bool) -> bool:
        """Whether every rank says yes."""
        with self.collective():
            return bool(self.tensor_parallel.all_reduce_min(int(word), torch.device("cpu")))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around what all ranks do at once: an error of the group names them."""
        with _naming(self._whom):
            yield

    def close(self) -> None:
        """From here on each rank ends alone."""
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
        """Rank 0's bytes on all ranks, which give as many of their own."""
        assert self.group is not None
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self.collective():
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor.numpy().tobytes()


def shard_index(replica: int, rank: int, tp: int) -> int:
    """The index among the fleet's shards of rank 1 or later of a replica."""
    return replica * (tp - 1) + rank - 1


def _meet(fleet: Fleet, tp: int, deadline_s: float) -> tuple[list[Member], str]:
    """The members of this replica, by rank, and the name of their meeting on the store.

    A meeting is of incarnations. The rollout calls it, once it sees shards that never met anybody; a shard follows the call
    that lists it, and says that it has met.
    """
    own, is_lead = fleet.me.index, fleet.me.role == "rollout"
    replica = own if is_lead else own // (tp - 1)

    def called() -> tuple[list[Member], str] | None:
        shards = fleet.members("shard")
        wanted = range(shard_index(replica, 1, tp), shard_index(replica, tp, tp))
        found = [m for m in fleet.members("rollout") if m.index == replica] + [m for m in shards if m.index in wanted]
        meeting = f"{fleet.me.role}-{replica}"
        if len(found) != tp or not all(m.is_alive and "device" in m.info for m in found):
            return None
        meeting = f"rollout-{replica}/" + ".".join(str(m.incarnation) for m in found)
        if is_lead:
            return None if any("meeting" in m.info for m in found[1:]) else (found, meeting)
        return (found, meeting) if found[0].info.get("meeting") == meeting else None

    with waiting(f"the other {tp - 1} ranks of rollout {replica}", "joining", deadline_s) as wait:
        found, meeting = wait.until(called, interval_s=0.02)
    fleet.announce(meeting=meeting)
    return found, meeting


def _open_group(fleet: Fleet, meeting: str, rank: int, size: int, backend: str, deadline_s: float) -> dist.ProcessGroup:
    """The group of a meeting: the default one of this process, or in the twin, whose ranks are threads, one beside it."""
    patience = timedelta(seconds=NO_TIMEOUT_S)
    if isinstance(fleet, MemoryFleet):
        with fleet.network.lock:
            store = _MEMORY_GROUPS.setdefault(fleet.network, dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]
        twin: Any = dist.ProcessGroupGloo(PrefixStore(meeting, store), rank, size, patience)
        return twin
    assert isinstance(fleet, StoreFleet)
    store = PrefixStore(meeting, connect_store(fleet.store_address, deadline_s))  # pyright: ignore[reportArgumentType]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _watch(fleet: Fleet, members: Sequence[Member], is_over: threading.Event) -> None:
    """Raise `PeerGone` in this thread, which ends the process, when a rank died: a replica restarts as a whole."""
    while not is_over.wait(POLL_S):
        present = {m.name: m.incarnation for m in fleet.members() if m.is_alive}
        for member in members:
            if present.get(member.name) != member.incarnation and not is_over.is_set():
                raise PeerGone(f"{member.name} is gone, of the replica {', '.join(m.name for m in members)}")


@contextmanager
def _naming(whom: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error) and "NCCL" not in str(error):
            raise
        raise PeerGone(f"one of {', '.join(whom)} is gone: {str(error).splitlines()[0]}") from error


def _backend(devices: Sequence[str]) -> str:
    """NCCL needs a GPU of its own for each rank; ranks that share one talk through the host."""
    has_own = all(devices) and len(set(devices)) == len(devices)
    return "cpu:gloo,cuda:nccl" if has_own else "cpu:gloo,cuda:gloo" if all(devices) else "gloo"
