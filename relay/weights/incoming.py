"""One version on its way into a slot: what of it is in place, and from whom.

A version comes in one part or in several, each brought by one upstream, which another may replace: the part then goes on at
the byte that it had reached. Offsets of a part count along its byte ranges.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto

import numpy as np

from ...comm.messages.weights import Offer
from .delta import DeltaCodec
from .digests import GRID_BYTES, chunk_digest, digest_of_ranges, join_digests
from .frames import ranges_of
from .shards import ByteRanges
from .slots import SlotWrite


class IncomingState(Enum):
    """Life of an arrival."""

    RESERVED = auto()
    """A slot that an actor may write ahead, before it is known for which version."""
    ARRIVING = auto()
    COMPLETE = auto()
    ABANDONED = auto()


def watermark(num_bytes: int, num_parts: int, ranges: Mapping[int, ByteRanges], done: Mapping[int, int]) -> int:
    """Bytes of the layout that are in place from its start, when `done` bytes of each part are."""
    if len(ranges) < num_parts:
        return 0
    unfinished = [part for part in ranges if done[part] < ranges[part].num_bytes]
    return min((ranges[part].locate(done[part])[0] for part in unfinished), default=num_bytes)


class IncomingVersion:
    """The bytes, upstreams and digests of one arriving version. Not locked: the desk's lock guards all but the hashing."""

    def __init__(self, offer: Offer, slot: SlotWrite, state: IncomingState) -> None:
        self.offer = offer
        self.slot = slot
        self.state = state
        self.digest = ""
        self.deltas = DeltaCodec()
        self.right_parts: set[int] = set()
        self._ranges: dict[int, ByteRanges] = {}
        self._done: dict[int, int] = {}
        self._upstreams: dict[int, str] = {}
        self._chunks: list[bytes] = []
        self._hashing = threading.Lock()

    @property
    def buffer(self) -> np.ndarray:
        """The slot, uint8 [num_bytes]."""
        return self.slot.buffer

    @property
    def bytes_ready(self) -> int:
        """Bytes in place from the start."""
        return watermark(self.offer.num_bytes, self.offer.num_parts, self._ranges, self._done)

    @property
    def is_open(self) -> bool:
        """True as long as bytes may come in."""
        return self.state in (IncomingState.RESERVED, IncomingState.ARRIVING)

    @property
    def is_delta(self) -> bool:
        """All that is known to come comes as differences: it is sent on as one, once it is complete."""
        return self.deltas.covers(self._upstreams.keys())

    def bind(self, offer: Offer) -> None:
        """Say which version a reserved slot is for."""
        self.offer, self.state = offer, IncomingState.ARRIVING
        self.slot = replace(self.slot, version=offer.version)

    def set_upstream(self, offer: Offer, upstream: str) -> int:
        """`upstream` brings the offered part from now on; returns the offset to go on from."""
        self._ranges[offer.part] = ranges_of(offer)
        self._upstreams[offer.part] = upstream
        self.deltas.forget(offer.part)
        return self._done.setdefault(offer.part, 0)

    def advance(self, part: int, upstream: str, done: int) -> bool:
        """`upstream` has brought its part up to `done`; False if it is not its to bring any more."""
        if self.state is not IncomingState.ARRIVING or self._upstreams.get(part) != upstream:
            return False
        self._done[part] = max(self._done[part], done)
        return True

    def is_from(self, part: int, upstream: str) -> bool:
        """True while `upstream` brings the part."""
        return self._upstreams.get(part) == upstream

    def ranges(self, part: int) -> ByteRanges:
        """The byte ranges of a part."""
        return self._ranges[part]

    def update_digest(self) -> None:
        """Digest the chunks that have arrived whole since the last call."""
        with self._hashing:
            arrived, num_bytes = self.bytes_ready, self.offer.num_bytes
            while (start := len(self._chunks) * GRID_BYTES) < num_bytes:
                if min(start + GRID_BYTES, num_bytes) > arrived:
                    break
                self._chunks.append(chunk_digest(self.buffer, start))

    def whole_digest(self) -> str:
        """The digest of all bytes; meaningful once they are in place."""
        self.update_digest()
        return join_digests(self._chunks)

    def part_digest(self, part: int) -> str:
        """The digest of one part's bytes."""
        if self.offer.num_parts == 1:
            return self.whole_digest()
        return digest_of_ranges(self.buffer, self._ranges[part].spans)

    def reset_part(self, part: int) -> None:
        """A part was wrong: it has to come again."""
        self._done[part] = 0
        with self._hashing:
            self._chunks.clear()
