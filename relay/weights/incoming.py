"""One version on its way into a slot: the bytes in place, the upstream of each part, the digests.

A version comes in one part or in several. One upstream sends each part, and another may replace it: the part then continues
at the byte that it had reached. Offsets of a part count along its byte ranges.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .byte_ranges import GRID_BYTES, ByteRanges, chunk_digest, digest_of_ranges, join_digests, ranges_of

if TYPE_CHECKING:
    from ...comm.messages.weights import Offer
    from .slots import StoredVersion

_WAKE_S = 1.0


def is_trainer(upstream: str) -> bool:
    """Whether an upstream is a rank of the trainer; others are relays."""
    return upstream.startswith("actor")


def watermark(num_bytes: int, num_parts: int, ranges: Mapping[int, ByteRanges], done: Mapping[int, int]) -> int:
    """Bytes of the layout that are in place from its start, when `done` bytes of each part are."""
    if len(ranges) < num_parts:
        return 0
    unfinished = [part for part in ranges if done[part] < ranges[part].num_bytes]
    return min((ranges[part].locate(done[part])[0] for part in unfinished), default=num_bytes)


@dataclass(eq=False)
class IncomingVersion:
    """The bytes, upstreams and digests of one incoming version.

    The store's lock guards everything but the digests; `advanced` is a condition of that lock.
    """

    offer: "Offer"
    slot: "StoredVersion"
    buffer: np.ndarray
    """The slot's bytes, uint8 [num_bytes]."""
    _advanced: threading.Condition
    digest: str = ""
    """Once the version is complete."""
    is_abandoned: bool = False
    """The version was given up: superseded, or its sender or this process ends."""
    _right_parts: set[int] = field(default_factory=set)
    _ranges: dict[int, ByteRanges] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _upstreams: dict[int, str] = field(default_factory=dict)
    _chunks: list[bytes] = field(default_factory=list)
    _hashing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes_ready(self) -> int:
        return watermark(self.offer.num_bytes, self.offer.num_parts, self._ranges, self._done)

    @property
    def is_arriving(self) -> bool:
        return not self.digest and not self.is_abandoned

    @property
    def is_pushed(self) -> bool:
        """True if the trainer sends it, and no relay."""
        return any(map(is_trainer, self._upstreams.values()))

    @property
    def is_checked(self) -> bool:
        """True while all parts are in place and match their digests."""
        return len(self._right_parts) == self.offer.num_parts

    def set_upstream(self, offer: "Offer", upstream: str) -> int:
        """`upstream` sends the offered part from now on; returns the offset to continue at."""
        self._ranges[offer.part] = ranges_of(offer)
        self._upstreams[offer.part] = upstream
        return self._done.setdefault(offer.part, 0)

    def advance(self, part: int, upstream: str, done: int) -> bool:
        """`done` bytes of a part are in place; False if `upstream` may no longer send the part."""
        if not self.is_arriving or not self.is_from(part, upstream):
            return False
        self._done[part] = max(self._done[part], done)
        return True

    def is_from(self, part: int, upstream: str) -> bool:
        return self._upstreams.get(part) == upstream

    def record_check(self, part: int, is_right: bool) -> None:
        """The bytes of a part match their digest, or must come again."""
        if is_right:
            self._right_parts.add(part)
            return
        self._right_parts.discard(part)
        self._done[part] = 0
        with self._hashing:
            self._chunks.clear()

    def digest_arriving(self) -> None:
        """Digest chunks until all have arrived; on a core of its own, while the thread that receives them goes on."""
        while self.is_arriving and (at := len(self._chunks) * GRID_BYTES) < self.offer.num_bytes:
            self.wait_bytes_ready(min(at + GRID_BYTES, self.offer.num_bytes) - 1, _WAKE_S)
            self.update_digest()

    def update_digest(self) -> None:
        """Digest the chunks that have arrived whole since the last call."""
        with self._hashing:
            arrived = self.bytes_ready
            num_bytes = self.offer.num_bytes
            while (start := len(self._chunks) * GRID_BYTES) < num_bytes:
                if min(start + GRID_BYTES, num_bytes) > arrived:
                    break
                self._chunks.append(chunk_digest(self.buffer, start))

    def whole_digest(self) -> str:
        """The digest of all bytes; empty if some are missing."""
        self.update_digest()
        with self._hashing:
            return join_digests(self._chunks) if len(self._chunks) * GRID_BYTES >= self.offer.num_bytes else ""

    def part_digest(self, part: int) -> str:
        if self.offer.num_parts == 1:
            return self.whole_digest()
        return digest_of_ranges(self.buffer, self._ranges[part].spans)

    def wait_bytes_ready(self, beyond: int, timeout_s: float) -> int:
        """Bytes in place from the start; waits up to `timeout_s` for more than `beyond`, or for the end of the arrival."""
        with self._advanced:
            self._advanced.wait_for(lambda: self.bytes_ready > beyond or not self.is_arriving, timeout_s)
            return self.bytes_ready

    def wait_digest(self, timeout_s: float) -> str | None:
        """The digest; None if the version is not complete within `timeout_s`."""
        with self._advanced:
            self._advanced.wait_for(lambda: not self.is_arriving, timeout_s)
            return self.digest or None
