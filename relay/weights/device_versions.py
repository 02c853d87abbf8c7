"""Versions on the actor's device, which rollouts of its host copy to theirs without host memory (`comm.cuda_ipc`).

Each actor rank keeps its part of the two newest versions in two buffers. Generation, version and incarnation of each are in a
segment of the actor's, like those of a relay's slots; a slot of that segment has the handle of its buffer. A rank writes a version
there first and publishes the bytes of that buffer, so the digest that relays check is that of the bytes on the device.

A rollout still learns from its relay which version is the newest. It then copies that version of that incarnation from the device,
waits for the copy, and compares the generations: a version that was overwritten meanwhile does not count. The first one
is compared with the relay's bytes too, since peer access between two GPUs is known to give wrong bytes on some machines. Whatever
fails, the rollout reads from the relay.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...comm.errors import PeerGone
from ...comm.fleet import Fleet, Member
from ...comm.links.device_memory import DeviceBuffer, Handle
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Segment
from .byte_ranges import ByteRanges, ranges_of
from .layout import Layout, local_tensor
from .shards import WeightShard
from .slots import StoredVersion, VersionSlots

_log = logging.getLogger(__name__)
_INFO = "device_weights"
"""The announcement of a rank with buffers: the path of the segment."""
_NUM_BUFFERS = 2
_PIECE_BYTES = 64 << 20


class BufferOffer(msgspec.Struct, frozen=True):
    """The content of a slot: the part that a buffer is for, and the handle of the buffer."""

    offer: Offer
    handle: Handle


class DeviceVersions:
    """The two newest versions of an actor rank's part, open to the rollouts of its host."""

    def __init__(self, fleet: Fleet, part: WeightShard, incarnation: int, device: torch.device) -> None:
        """Raises `RuntimeError` if the device has no room for two copies of the part or cannot share memory."""
        self._part = part
        self._incarnation = incarnation
        self._buffers = DeviceBuffer.allocate(_NUM_BUFFERS, part.num_bytes, device)
        offer = part.offer(-1, incarnation)
        contents = [msgspec.json.encode(BufferOffer(offer, buffer.handle)) for buffer in self._buffers]
        self._slots = VersionSlots(Segment.create_anonymous("headrace device weights"), _NUM_BUFFERS)
        self._slots.prepare(max(map(len, contents)), part.layout.fingerprint)
        for index, content in enumerate(contents):
            self._slots.segment.slot(index)[: len(content)] = np.frombuffer(content, np.uint8)
        fleet.announce(**{_INFO: self._slots.segment.path})

    @staticmethod
    def open(
        fleet: Fleet, part: WeightShard, incarnation: int, tensors: Mapping[str, Tensor]
    ) -> "DeviceVersions | None":
        """Buffers on the device of these tensors; None, with a warning, if there can be none."""
        try:
            return DeviceVersions(fleet, part, incarnation, local_tensor(next(iter(tensors.values()))).device)
        except RuntimeError as error:
            _log.warning("comm.cuda_ipc: weights take the way through the relay: %s", str(error))
            return None

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """Cast and copy the tensors into the older buffer; returns its bytes, uint8 [num_bytes], all in place."""
        write = self._slots.begin(version, force=True)
        assert write is not None
        buffer = self._buffers[write.slot].tensor[: self._part.num_bytes]
        self._part.write(tensors, buffer)  # ends when the device has done it
        self._slots.commit(write, "0", self._incarnation)
        return buffer

    def close(self) -> None:
        """No version counts from now on, also for a rollout that is copying one."""
        self._slots.withdraw()
        self._slots.close()
        for buffer in self._buffers:
            buffer.close()


@dataclass(frozen=True, slots=True)
class _OpenPart:
    """One actor rank's buffers, opened by a rollout, and the copies (from, to, bytes) that give what the rollout takes."""

    offer: Offer
    slots: VersionSlots
    buffers: tuple[DeviceBuffer, ...]
    copies: tuple[tuple[int, int, int], ...]

    @staticmethod
    def open(path: str, wanted: ByteRanges) -> "_OpenPart | None":
        """None if the part has none of the bytes that are wanted. Raises `PeerGone`."""
        segment = Segment.open(path)
        contents = [segment.slot(index).tobytes().rstrip(b"\0") for index in range(segment.num_slots)]
        offers = [msgspec.json.decode(content, type=BufferOffer) for content in contents]
        part = offers[0].offer
        copies = tuple(_overlaps(ranges_of(part), wanted))
        if not copies:
            segment.close()
            return None
        try:
            buffers = tuple(DeviceBuffer.open(offer.handle) for offer in offers)
        except PeerGone:
            segment.close()
            raise
        return _OpenPart(part, VersionSlots(segment), buffers, copies)

    def close(self) -> None:
        self.slots.close()
        for buffer in self.buffers:
            buffer.close()


class DeviceVersionReader:
    """A rollout rank's end: `read` copies a version that its relay has from the devices of the actor's ranks."""

    def __init__(self, fleet: Fleet, layout: Layout, tp_rank: int, relay_slots: VersionSlots) -> None:
        self._fleet = fleet
        self._layout = layout
        self._wanted = ByteRanges(layout.spans_of(tp_rank))
        tensors = ByteRanges(tuple((entry.offset, entry.offset + entry.num_bytes) for entry in layout.entries))
        self._least = _num_bytes(_overlaps(tensors, self._wanted))
        """The bytes of tensors among those wanted; the rest is padding."""
        self._relay_slots = relay_slots
        self._owners: list[Member] = []
        self._parts: list[_OpenPart] = []
        self.is_proven = False
        """Whether a version that this actor wrote was copied and had the relay's bytes."""

    def read(self, stored: StoredVersion, into: Tensor) -> bool:
        """Copy a version into `into`, uint8 of all bytes that this rank takes, on any device.

        If it returns False, the bytes of `into` are undefined.
        """
        self._follow_actor()
        found = [part.slots.find(stored.version) for part in self._parts]
        held = [each for each in found if each is not None and each.incarnation == stored.incarnation]
        if not held or len(held) < len(self._parts):
            return False
        for part, version in zip(self._parts, held, strict=True):
            source = part.buffers[version.slot].tensor
            for start, at, num_bytes in part.copies:
                into[at : at + num_bytes].copy_(source[start : start + num_bytes], non_blocking=True)
        if into.is_cuda:
            torch.cuda.current_stream(into.device).synchronize()
        is_whole = all(part.slots.is_valid(version) for part, version in zip(self._parts, held, strict=True))
        return is_whole and (self.is_proven or self._prove(stored, into))

    def close_dead(self) -> None:
        """Close all buffers if one of their owners has died: a GPU keeps the memory of a dead process while it is open elsewhere."""
        if self._parts and not all(owner in self._fleet.alive_members("actor", having=_INFO) for owner in self._owners):
            self.close()
            self._owners = []  # one that only seemed dead is followed again

    def close(self) -> None:
        """Close what is open; the memory stays its owner's."""
        for part in self._parts:
            part.close()
        self._parts, self.is_proven = [], False

    def _follow_actor(self) -> None:
        """Open the buffers of the actor's ranks when they have changed; those of a dead or earlier process are closed."""
        owners = [m for m in self._fleet.alive_members("actor", having=_INFO) if m.host == self._fleet.me.host]
        if owners == self._owners:
            return
        self.close()
        self._owners = owners
        try:
            for member in owners:
                if (part := _OpenPart.open(member.info[_INFO], self._wanted)) is not None:
                    self._parts.append(part)
        except PeerGone as error:
            self.close()
            _log.warning("comm.cuda_ipc: weights take the way through the relay: %s", str(error))
        is_other = any(part.offer.fingerprint != self._layout.fingerprint for part in self._parts)
        if is_other or sum(_num_bytes(part.copies) for part in self._parts) < self._least:
            self.close()  # another layout, which the relay names, or rows of ranks that are on other hosts or still to come

    def _prove(self, stored: StoredVersion, copied: Tensor) -> bool:
        """Whether a copy has the relay's bytes; if not, this actor's buffers are not used again."""
        source = torch.from_numpy(self._relay_slots.segment.slot(stored.slot))
        is_same = all(
            torch.equal(copied[at : at + end - start].cpu(), source[start:end])
            for at, start, end in self._wanted.chunks(0, _PIECE_BYTES)
        )
        if not self._relay_slots.is_valid(stored):
            return False  # overwritten meanwhile: the next version is compared
        names = ", ".join(member.name for member in self._owners)
        if is_same:
            self.is_proven = True
            _log.info("weights come from the device of %s", names)
        else:
            self.close()
            _log.warning("comm.cuda_ipc: version %d on %s has other bytes than the relay's", stored.version, names)
        return is_same


def _num_bytes(copies: Iterable[tuple[int, int, int]]) -> int:
    return sum(num_bytes for _, _, num_bytes in copies)


def _overlaps(part: ByteRanges, wanted: ByteRanges) -> Iterator[tuple[int, int, int]]:
    """(offset in the part, offset in what is wanted, bytes) of each run of bytes that a part has of what is wanted."""
    for (start, end), at in zip(part.spans, part.starts, strict=False):
        for (low, high), into in zip(wanted.spans, wanted.starts, strict=False):
            first, last = max(start, low), min(end, high)
            if first < last:
                yield at + first - start, into + first - low, last - first
