"""How a published version gets from the trainer's host memory to a relay: through its segment, or over a link.

Through shared memory the publisher holds a claim ahead: the slot that the next version is to be written into. The trainer
then writes its tensors straight to where rollouts read them, and asks nobody while it does.
"""

import itertools
import logging
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...comm.errors import PeerGone, SettingError
from ...comm.fleet import Fleet, Member
from ...comm.mailbox import Mailbox
from ...comm.messages import PushResult, ReserveSlot, ShardWritten, SlotReserved
from ...comm.messages.weights import Offer
from ...comm.recipe import CommSettings, RelaySettings
from ...comm.shared_memory import Segment
from ...comm.waits import waiting
from .chain import open_push_link
from .chunks import ChunkSizer
from .delta import DeltaSource, Difference
from .frames import ranges_of
from .protocol import MAX_PIECE_BYTES, SILENCE_S, send_idle, send_version
from .shards import WeightShard
from .slots import READER_LOCK_S, VersionSlots

_log = logging.getLogger(__name__)
_REPEAT_S = 1.0  # a question is repeated until answered: the relay may have come back meanwhile
ANSWER_S = 1.0
"""Seconds that a relay may take to answer besides what it has to do."""
_SLOWEST_BYTE_S = 1 / 0.2e9  # for the first version, before the relay's pace is known


@dataclass(slots=True)
class PendingVersion:
    """A published version, or one rank's part of it, in memory of this process or in the slot that was claimed for it."""

    offer: Offer
    part: WeightShard
    buffer: np.ndarray
    reservation: SlotReserved | None = None
    """The slot that is this publication's already."""
    is_in_slot: bool = False
    """True if `buffer` is that slot; else it is still to be copied there."""
    computed: str = ""
    difference: Difference | None = None

    def moved(self) -> "PendingVersion":
        """The publication without its slot, in memory of this process."""
        return (
            PendingVersion(self.offer, self.part, self.buffer.copy())
            if self.is_in_slot
            else replace(self, reservation=None)
        )

    def bytes_at(self, at: int, start: int, end: int) -> np.ndarray:
        """Bytes from `at` of the part on."""
        return self.buffer[at : at + end - start]

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        """All of it."""
        return self.part.num_bytes

    def digest(self, timeout_s: float) -> str:
        """Computed when it is first asked for."""
        self.computed = self.computed or self.part.digest(self.buffer)
        return self.computed

    def is_valid(self) -> bool:
        """It stays until it was sent."""
        return True


class SharedMemoryPush:
    """Pushes into the segment of a relay on this host."""

    def __init__(self, relay: Member, fleet: Fleet, mailbox: Mailbox, settings: CommSettings) -> None:
        self.relay = relay
        self._fleet = fleet
        self._mailbox = mailbox
        self._byte_s = _SLOWEST_BYTE_S
        self._segment = Segment.open(relay.info["segment"])
        self._slots = VersionSlots(self._segment)
        # Answers to an earlier incarnation of this process, or of the relay's, are still under way.
        self._request_ids = itertools.count(time.monotonic_ns())
        self._reservation: SlotReserved | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pinned: set[int] = set()

    def reserve_next(self, part: WeightShard) -> None:
        """Ask for the slot of the next version; parts of several ranks meet in one slot, which none can claim alone."""
        if part.num_parts == 1 and self._reservation is None:
            offer = Offer(-1, part.layout.num_bytes, part.layout.fingerprint)
            answer = self._ask(ReserveSlot(next(self._request_ids), offer))
            if isinstance(answer, SlotReserved):
                pin(self._segment.slot(answer.slot), self._pinned)  # maps the slots now, while nobody waits for them
                with self._lock:
                    self._reservation = answer

    def take_reservation(self) -> SlotReserved | None:
        """The slot that was claimed, handed out once; None if there is none or the relay has taken it back."""
        with self._lock:
            claim, self._reservation = self._reservation, None
            if claim is None or self._closed or self._slots.generation(claim.slot) != claim.generation:
                return None
            return claim

    def slot(self, reservation: SlotReserved) -> np.ndarray:
        """The memory that was claimed."""
        return self._segment.slot(reservation.slot)

    def push(self, publication: PendingVersion) -> None:
        """Bring a publication to the relay; returns when it has checked the bytes. Raises `PeerGone`, `WaitTimeout`."""
        offer = publication.offer
        answer = publication.reservation or self._ask(ReserveSlot(next(self._request_ids), offer))
        if isinstance(answer, SlotReserved):
            if not publication.is_in_slot:
                slot = self._segment.slot(answer.slot)
                for at, start, end in ranges_of(offer).chunks(0, publication.part.num_bytes):
                    np.copyto(slot[start:end], publication.bytes_at(at, start, end))
            answer = self._check(ShardWritten(next(self._request_ids), offer, answer.generation, publication.digest(0)))
        if isinstance(answer, PushResult) and answer.refusal:
            if publication.reservation is not None:
                self._push_again(publication)
            else:
                _log.warning("%s refused version %d: %s", self.relay.name, publication.offer.version, answer.refusal)

    def keep_alive(self) -> None:
        """Nothing to do: the kernel keeps shared memory."""

    def close(self) -> None:
        """Let go of the segment."""
        with self._lock:
            self._closed, self._reservation = True, None
        self._segment.close()

    def _push_again(self, publication: PendingVersion) -> None:
        """The slot written ahead is not this trainer's any more: save the bytes if they still stand there, then ask anew."""
        saved = publication.moved()
        saved.computed = ""
        if saved.digest(0) == publication.computed:
            self.push(saved)
        else:
            _log.warning("version %d was overwritten in its slot; the next one will follow", publication.offer.version)

    def _check(self, written: ShardWritten) -> SlotReserved | PushResult:
        """Have the relay check the bytes, and learn its pace."""
        started = time.monotonic()
        answer = self._ask(written)
        self._byte_s = max(self._byte_s / 2, (time.monotonic() - started) / max(written.offer.num_bytes, 1))
        return answer

    def _ask(self, request: ReserveSlot | ShardWritten) -> SlotReserved | PushResult:
        """A relay that takes several times as long as it needs counts as frozen, long before the fleet gives it up."""
        patience_s = ANSWER_S + READER_LOCK_S + 4 * self._byte_s * request.offer.num_bytes
        identity, started = (self.relay.name, self.relay.incarnation), time.monotonic()
        with waiting(self.relay.name, f"its answer to {type(request).__name__}", patience_s):
            while (
                identity in {(m.name, m.incarnation) for m in self._fleet.alive_members("relay")} and not self._closed
            ):
                if time.monotonic() - started > patience_s:
                    raise PeerGone(f"{self.relay.name} has not answered for {patience_s:.1f} s")
                self._mailbox.send(f"{self.relay.name}/weights", request)
                until = time.monotonic() + min(_REPEAT_S, patience_s)
                while (left := until - time.monotonic()) > 0:
                    letter = self._mailbox.receive(min(left, 0.1))
                    answer = letter.message if letter is not None else None
                    if isinstance(answer, SlotReserved | PushResult) and answer.request_id == request.request_id:
                        return answer
        raise PeerGone(f"{self.relay.name} is gone")


class LinkPush:
    """Pushes over a link to a relay anywhere."""

    def __init__(self, relay: Member, fleet: Fleet, mailbox: Mailbox, settings: CommSettings, backend: str) -> None:
        self.relay = relay
        self._deltas = DeltaSource() if settings.delta else None
        self._fleet = fleet
        self._link = open_push_link(fleet, mailbox, relay.name, backend, SILENCE_S)
        # Staging buckets overlap within a piece.
        self._chunk_sizer = ChunkSizer(MAX_PIECE_BYTES if backend in ("nccl", "staged") else settings.chunk_bytes)

    def reserve_next(self, part: WeightShard) -> None:
        """There is nothing to claim."""

    def take_reservation(self) -> None:
        """Nothing is claimed."""

    def slot(self, reservation: SlotReserved) -> np.ndarray:
        """There is no slot."""
        raise AssertionError("a link has no slots")

    def push(self, publication: PendingVersion) -> None:
        """Send a publication; returns when the relay has checked the bytes. Raises `LinkBroken`."""
        version, buffer = publication.offer.version, publication.buffer
        if self._deltas is not None:
            publication.difference = self._deltas.offer(version, buffer, publication.part.layout.element_bytes)
        started, num_nodes = time.monotonic(), 1 + len(self._fleet.alive_members("relay"))
        if send_version(
            self._link, publication, SILENCE_S, self._chunk_sizer.chunk_bytes(num_nodes, publication.part.num_bytes)
        ):
            self._chunk_sizer.record(publication.part.num_bytes, time.monotonic() - started)
        if self._deltas is not None:
            self._deltas.remember(version, buffer)

    def keep_alive(self) -> None:
        """Show the relay that this end is there. Raises `LinkBroken`."""
        send_idle(self._link, SILENCE_S)

    def close(self) -> None:
        """End the link."""
        self._link.close()


def open_push(relay: Member, fleet: Fleet, mailbox: Mailbox, settings: CommSettings) -> SharedMemoryPush | LinkPush:
    """The way to a relay under these settings. Raises `PeerGone`, `LinkBroken` or `SettingError`."""
    staging = relay.info.get("staging", "")
    if staging == "nccl" and not torch.cuda.is_available():
        raise SettingError("relay.staging_device: the actor has no GPU to broadcast from; leave the setting out")
    if not staging and is_shared(relay, fleet, settings):
        return SharedMemoryPush(relay, fleet, mailbox, settings)
    return LinkPush(relay, fleet, mailbox, settings, staging or remote_backend(settings))


def staging_of(settings: RelaySettings) -> str:
    """The back end over which a relay wants versions from actors; empty for whichever fits."""
    device = settings.staging_device
    return "" if device is None else "staged" if device == "cpu" else "nccl"


def is_shared(relay: Member, fleet: Fleet, settings: CommSettings) -> bool:
    """Whether the relay's segment is to be used by a process of this host. Raises `SettingError`."""
    is_here = relay.host == fleet.me.host
    if settings.link == "shm" and not is_here:
        raise SettingError(f"comm.link: shm cannot reach {relay.name} on {relay.host} from {fleet.me.host}; use auto")
    return is_here and settings.link in ("auto", "shm")


def remote_backend(settings: CommSettings) -> str:
    """The back end of links between hosts under these settings."""
    return "nccl" if settings.link == "nccl" else "tcp"


def pin(slot: np.ndarray, pinned: set[int]) -> None:
    """Pin a slot's pages for copies from a GPU, once; where CUDA refuses, copies are merely slower."""
    address = slot.ctypes.data
    if address not in pinned and torch.cuda.is_available() and (runtime := torch.cuda.cudart()) is not None:
        runtime.cudaHostRegister(address, slot.nbytes, 0)
    pinned.add(address)
