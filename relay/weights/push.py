"""How a published version gets from the trainer's host memory to a relay: through the relay's segment, or over a link.

Through shared memory the publisher reserves the slot of the next version ahead. The trainer then writes its tensors straight
to the slot that rollouts read, and waits for no answer.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
import torch

from ...comm.errors import PeerGone, SettingError
from ...comm.fleet import Fleet, Member, is_shared
from ...comm.links.opening import remote_backend
from ...comm.mailbox import Mailbox
from ...comm.messages.weights import Offer, PushResult, ReserveSlot, ShardWritten, SlotReserved
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from ...comm.waits import waiting
from .byte_ranges import ranges_of
from .chain import open_push_link
from .pinned import host_buffer
from .protocol import MAX_PIECE_BYTES, SILENCE_S
from .shards import WeightShard
from .slots import READER_LOCK_S, VersionSlots
from .transfer import ChunkedSender

_log = logging.getLogger(__name__)
_REPEAT_S = 1.0  # a request is repeated until answered: the relay may have restarted meanwhile
ANSWER_S = 1.0
"""Seconds that a relay may take to answer besides the time of its work."""
_SLOWEST_BYTE_S = 1 / 0.2e9  # for the first version, before the relay's speed is known


class SlotUse(Enum):
    """The part that a slot of the relay, reserved ahead, plays for a pending version."""

    NONE = auto()
    """The bytes are in memory of this process, and no slot is reserved for them."""
    RESERVED = auto()
    """The bytes are in memory of this process; the reserved slot is theirs."""
    WRITTEN = auto()
    """The buffer is the reserved slot: the trainer writes there, and nothing is copied."""


@dataclass(slots=True)
class PendingVersion:
    """A published version, or one rank's part of it, from the first byte written until a relay has it; owns its buffer."""

    offer: Offer
    part: WeightShard
    buffer: np.ndarray
    use: SlotUse = SlotUse.NONE
    reservation: SlotReserved | None = None
    is_reserved: Callable[[], bool] = lambda: True
    """Whether the reserved slot is still this version's."""
    _digest: str = ""

    def detached(self, memory: Callable[[int], np.ndarray] = host_buffer) -> "PendingVersion | None":
        """The version without its slot, in `memory` of this process; None if the bytes in its slot were overwritten."""
        if self.use is not SlotUse.WRITTEN:
            return replace(self, use=SlotUse.NONE, reservation=None)
        expected = self.digest(0)
        copy = PendingVersion(self.offer, self.part, memory(self.part.num_bytes))
        np.copyto(copy.buffer, self.buffer)
        if copy.digest(0) == expected:
            return copy
        _log.warning("version %d was overwritten in its slot; the next one will follow", self.offer.version)
        return None

    def bytes_at(self, at: int, start: int, end: int) -> np.ndarray:
        return self.buffer[at : at + end - start]

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        return self.part.num_bytes

    def digest(self, timeout_s: float) -> str:
        if not self._digest:
            digest = self.part.digest(self.buffer)
            # In a slot that was taken back the bytes may be another version's.
            is_whole = self.use is not SlotUse.WRITTEN or self.is_reserved()
            self._digest = digest if is_whole else "overwritten"
        return self._digest

    def is_valid(self) -> bool:
        return True


class SharedMemoryPush:
    """Pushes into the segment of a relay on this host."""

    def __init__(self, relay: Member, fleet: Fleet, mailbox: Mailbox) -> None:
        self.relay = relay
        self._fleet = fleet
        self._mailbox = mailbox
        self._byte_s = _SLOWEST_BYTE_S
        self._slots = VersionSlots(Segment.open(relay.info["segment"]))
        # Answers to an earlier incarnation of this process, or of the relay's, may still arrive.
        self._request_ids = itertools.count(time.monotonic_ns())

    def reserve_slot(self, part: WeightShard, incarnation: int) -> SlotReserved | None:
        """A slot for the next version. Parts of several ranks share one slot, which no rank can reserve alone."""
        if part.num_parts > 1:
            return None
        answer = self._request(ReserveSlot(next(self._request_ids), part.offer(-1, incarnation)))
        if not isinstance(answer, SlotReserved):
            return None
        self._slots.pin(answer.slot)  # maps the slot now, while the trainer does not wait for it
        return answer

    def is_reserved(self, reservation: SlotReserved) -> bool:
        """False once the relay has taken the slot back; after `close` what it was then."""
        return self._slots.generation(reservation.slot) == reservation.generation

    def buffer_of(self, reservation: SlotReserved) -> np.ndarray:
        """The memory of a reserved slot, uint8 [num_bytes]."""
        return self._slots.segment.slot(reservation.slot)

    def push(self, version: PendingVersion) -> None:
        """Push a version; returns when the relay has checked its bytes. Raises `PeerGone`."""
        offer = version.offer
        answer = version.reservation or self._request(ReserveSlot(next(self._request_ids), offer))
        if isinstance(answer, SlotReserved):
            if version.use is not SlotUse.WRITTEN:
                slot = self._slots.segment.slot(answer.slot)
                for at, start, end in ranges_of(offer).chunks(0, version.part.num_bytes):
                    np.copyto(slot[start:end], version.bytes_at(at, start, end))
            written = ShardWritten(next(self._request_ids), offer, answer.generation, version.digest(0))
            started = time.monotonic()
            answer = self._request(written)
            self._byte_s = max(self._byte_s / 2, (time.monotonic() - started) / max(offer.num_bytes, 1))
        if isinstance(answer, PushResult) and answer.refusal:
            if version.use is SlotUse.NONE:
                _log.warning("%s refused version %d: %s", self.relay.name, offer.version, answer.refusal)
            elif (detached := version.detached()) is not None:  # the slot is no longer reserved for this trainer
                self.push(detached)

    def close(self) -> None:
        self._slots.close()

    def _request(self, request: ReserveSlot | ShardWritten) -> SlotReserved | PushResult:
        """The answer. A relay that takes several times as long as its work counts as frozen, long before the fleet says so."""
        patience_s = ANSWER_S + READER_LOCK_S + 4 * self._byte_s * request.offer.num_bytes
        identity = (self.relay.name, self.relay.incarnation)
        started = time.monotonic()
        with waiting(self.relay.name, f"its answer to {type(request).__name__}", patience_s):
            while identity in {(m.name, m.incarnation) for m in self._fleet.alive_members("relay")}:
                if time.monotonic() - started > patience_s:
                    raise PeerGone(f"{self.relay.name} has not answered for {patience_s:.1f} s")
                self._mailbox.send(f"{self.relay.name}/weights", request)
                until = time.monotonic() + min(_REPEAT_S, patience_s)
                while (left := until - time.monotonic()) > 0:
                    envelope = self._mailbox.receive(min(left, 0.1))
                    answer = envelope.message if envelope is not None else None
                    if isinstance(answer, SlotReserved | PushResult) and answer.request_id == request.request_id:
                        return answer
        raise PeerGone(f"{self.relay.name} is gone")


class LinkPush:
    """Pushes over a link to a relay on any host; it reserves no slots."""

    def __init__(self, relay: Member, fleet: Fleet, mailbox: Mailbox, backend: str) -> None:
        self.relay = relay
        self._fleet = fleet
        self.link = open_push_link(fleet, mailbox, relay.name, backend, SILENCE_S)
        # Staging buckets overlap within a piece.
        self._chunked_sender = ChunkedSender(MAX_PIECE_BYTES if backend in ("nccl", "staged") else None)

    def push(self, version: PendingVersion) -> None:
        """Push a version; returns when the relay has checked its bytes. Raises `LinkBroken`."""
        num_nodes = 1 + len(self._fleet.alive_members("relay"))
        self._chunked_sender.send(self.link, version, version.part.num_bytes, num_nodes)

    def close(self) -> None:
        self.link.close()


def open_push(relay: Member, fleet: Fleet, mailbox: Mailbox, settings: CommSettings) -> SharedMemoryPush | LinkPush:
    """The way to a relay under these settings. Raises `PeerGone`, `LinkBroken` or `SettingError`."""
    staging = relay.info.get("staging", "")
    if staging == "nccl" and not torch.cuda.is_available():
        raise SettingError("comm.link: nccl needs a GPU at both ends, and the actor has none")
    if not staging and is_shared(relay, fleet, settings):
        return SharedMemoryPush(relay, fleet, mailbox)
    return LinkPush(relay, fleet, mailbox, staging or remote_backend(settings))
