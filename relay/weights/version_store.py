"""The versions of one relay: the one that arrives, and the complete ones in the slots.

At most one version arrives at a time. Its sender's thread calls `begin_receive`, fills the buffer, calls `advance`, and at
the end `finish`, which checks the digest. Threads that send it on call `next_source`, also before it has arrived whole. A
newer version supersedes an older one that has not arrived whole; a version that is offered again continues at the byte that
it had reached.

A version comes in one part or in several. One upstream sends each part, and another may replace it: the part then continues
at the byte that it had reached. Offsets of a part count along its byte ranges.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...comm.errors import LinkBroken
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Segment
from .byte_ranges import GRID_BYTES, ByteRanges, chunk_digest, digest_of_ranges, join_digests, ranges_of
from .slots import READER_LOCK_S, StoredVersion, VersionSlots

_log = logging.getLogger(__name__)
_POLL_S = 1e-3  # the kernel does not notify of a lock that a reader gives back
_WAKE_S = 1.0


@dataclass(eq=False)
class IncomingVersion:
    """The bytes, upstreams and digests of one incoming version.

    The store's lock guards everything but the digests; `advanced` is a condition of that lock.
    """

    offer: Offer
    slot: StoredVersion
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

    def set_upstream(self, offer: Offer, upstream: str) -> int:
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


@dataclass(eq=False)
class VersionSource:
    """A version to send, or one rank's part of it, which may still be arriving. Its memory is not written until `close`."""

    offer: Offer
    buffer: np.ndarray
    """The part's bytes, uint8."""
    bytes_ready: Callable[[int, float], int]
    """(beyond, timeout_s) -> bytes that are in place from the start; waits for more than `beyond`."""
    digest: Callable[[float], str | None]
    """timeout_s -> the digest, or None if it was not known by then."""
    is_valid: Callable[[], bool]
    """False once the version was abandoned or its bytes were overwritten."""
    close: Callable[[], None]
    """The version is sent no more."""


class VersionStore:
    """The incoming and complete versions of one segment; any thread may call."""

    def __init__(self, segment: Segment, reader_lock_s: float = READER_LOCK_S) -> None:
        """`reader_lock_s` bounds the wait for readers when they lock all slots that may be written."""
        self.slots = VersionSlots(segment)
        self.num_resumed = 0
        """Parts that continued in their middle, over another link than the one on which they had begun."""
        self._reader_lock_s = reader_lock_s
        # Bytes arrive far more often than versions: a thread that waits for a version does not wake for every chunk.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._advanced = threading.Condition(lock)
        self.incoming: IncomingVersion | None = None
        """The version that is on its way in."""
        self._trainer_incarnation = 0
        self._num_filling: Counter[int] = Counter()
        """Threads that write a piece into each slot."""
        self._num_sending: Counter[int] = Counter()
        """Sources of each slot."""
        self.closed = False

    def close(self) -> None:
        """Abandon the incoming version and wake all waits. The next relay sees a broken link and keeps what it received."""
        with self._changed:
            self.closed = True
            self._abandon()
            self._notify()

    def fence(self, incarnation: int) -> None:
        """Refuse what earlier incarnations of the trainer send from now on; a version that one has begun is abandoned.

        Otherwise a rank that was frozen while the others restarted could complete it. Offers of relays are accepted: they are complete.
        """
        with self._changed:
            if incarnation <= self._trainer_incarnation:
                return
            self._trainer_incarnation = incarnation
            incoming = self.incoming
            if incoming is not None and incoming.is_pushed and incoming.offer.incarnation < incarnation:
                self._abandon()

    def begin_receive(self, offer: Offer, upstream: str) -> tuple[IncomingVersion, int] | None:
        """The place for an offered version and the offset to continue at, also after another upstream; None if not wanted.

        Raises `WrongDigest` for another layout than that of the stored versions, `LinkBroken` when the store is closed or an
        earlier incarnation of the trainer offers.
        """
        forced_at = time.monotonic() + self._reader_lock_s
        with self._changed:
            while True:
                if self.closed:
                    raise LinkBroken("this relay ends")
                if is_trainer(upstream):
                    self.fence(offer.incarnation)
                    if offer.incarnation < self._trainer_incarnation:
                        raise LinkBroken(
                            f"incarnation {offer.incarnation} of the trainer is fenced:"
                            f" {self._trainer_incarnation} has started"
                        )
                newest = self.slots.newest()
                incoming = self.incoming
                if newest is not None and newest >= offer.version:
                    return None
                if incoming is not None and incoming.is_arriving:
                    if incoming.offer.identity == offer.identity:
                        break
                    if incoming.offer.identity[:2] > offer.identity[:2]:
                        return None
                if (incoming := self._begin(offer, forced_at)) is not None:
                    break
            at = incoming.set_upstream(offer, upstream)
            self.num_resumed += at > 0
            self._notify()
            return incoming, at

    def fill(self, incoming: IncomingVersion, part: int, upstream: str, done: int, write: Callable[[], None]) -> bool:
        """Have `write` put a piece in place, then `advance`; False if `upstream` may no longer send the part.

        No other version begins in this slot meanwhile: `write` may last longer than its version is wanted.
        """
        slot = incoming.slot.slot
        with self._changed:
            if not incoming.is_arriving:
                return False
            self._num_filling[slot] += 1
        try:
            write()
        finally:
            with self._changed:
                self._num_filling[slot] -= 1
        return self.advance(incoming, part, upstream, done)

    def advance(self, incoming: IncomingVersion, part: int, upstream: str, done: int) -> bool:
        """`done` bytes of a part are in place; False if `upstream` may no longer send the part."""
        with self._changed:
            if not incoming.advance(part, upstream, done):
                return False
            self._advanced.notify_all()
            return True

    def finish(self, incoming: IncomingVersion, part: int, digest: str) -> bool:
        """Check a part that is in place; the last right part makes the version readable. False if the part must come again.

        Digests take long, so they are computed without the lock, and the state is checked again under the lock.
        """
        is_right = incoming.part_digest(part) == digest
        with self._changed:
            if not incoming.is_arriving:
                return bool(incoming.digest)
            incoming.record_check(part, is_right)
            if not is_right:
                _log.warning(
                    "digest mismatch for version %d, part %d; it is requested again", incoming.offer.version, part
                )
            if not incoming.is_checked:
                return is_right
        whole = incoming.whole_digest()
        with self._changed:
            # Meanwhile the version may have been abandoned, or a part been found wrong that another upstream sent again.
            if incoming.is_arriving and incoming.is_checked and whole:
                incoming.digest = whole
                self.slots.commit(incoming.slot, whole)
                self._notify()
            return not incoming.is_abandoned

    def abandon(self, incoming: IncomingVersion, part: int, upstream: str) -> None:
        """Abandon a version because `upstream`, which sends this part, has."""
        with self._changed:
            if incoming.is_arriving and incoming.is_from(part, upstream):
                self._abandon()

    def _begin(self, offer: Offer, forced_at: float) -> IncomingVersion | None:
        """A slot for an offer. While readers lock all slots, waits a moment without the store's lock, and returns None."""
        self.slots.prepare(offer.num_bytes, offer.fingerprint)
        self._abandon()
        force = time.monotonic() >= forced_at
        sent = {stored.slot for stored in self.slots.complete_versions() if self._num_sending[stored.slot]}
        busy = {*+self._num_filling, *(() if force else sent)}
        slot = self.slots.begin(offer.version, offer.incarnation, force=force, busy=busy)
        if slot is None:
            self._changed.wait(_POLL_S)
            return None
        self.incoming = IncomingVersion(offer, slot, self.slots.segment.slot(slot.slot), self._advanced)
        threading.Thread(target=self.incoming.digest_arriving, name="weights digest", daemon=True).start()
        return self.incoming

    def _abandon(self) -> None:
        if self.incoming is not None and self.incoming.is_arriving:
            self.incoming.is_abandoned = True
            self.slots.abort(self.incoming.slot)
            self._notify()
        self.incoming = None  # its buffer is a view that would hold the segment's memory

    def _notify(self) -> None:
        self._changed.notify_all()
        self._advanced.notify_all()

    def next_source(self, above: int, timeout_s: float) -> VersionSource | None:
        """The newest version above `above`, arriving or complete, which the caller closes; None if none comes in time."""

        def find() -> IncomingVersion | StoredVersion | None:
            incoming = self.incoming
            if incoming is not None and incoming.is_arriving and incoming.offer.version > above:
                return incoming
            newest = self.slots.newest_stored()
            return newest if newest is not None and newest.version > above else None

        with self._changed:
            self._changed.wait_for(lambda: self.closed or find() is not None, timeout_s)
            return self._source(None if self.closed else find())

    def source_of(self, version: int) -> VersionSource | None:
        """A complete version by its number, which the caller closes; None if it is not stored."""
        with self._changed:
            return self._source(self.slots.find(version))

    def _source(self, found: IncomingVersion | StoredVersion | None) -> VersionSource | None:
        """A version that is sent on, complete or still arriving. Until it is closed it holds its slot as a reader does."""
        if found is None:
            return None
        incoming = found if isinstance(found, IncomingVersion) else None
        held = found.slot if isinstance(found, IncomingVersion) else found
        generations = (held.generation, held.generation + (incoming is not None))
        self._num_sending[held.slot] += 1

        def is_valid() -> bool:
            if self.closed:
                raise LinkBroken("this relay ends")
            is_there = incoming is None or not incoming.is_abandoned
            return is_there and self.slots.generation(held.slot) in generations

        def close() -> None:
            with self._changed:
                self._num_sending[held.slot] -= 1

        num_bytes = self.slots.segment.slot_bytes
        offer = Offer(held.version, num_bytes, self.slots.fingerprint, incarnation=held.incarnation)
        buffer = self.slots.segment.slot(held.slot)
        if incoming is not None:
            return VersionSource(offer, buffer, incoming.wait_bytes_ready, incoming.wait_digest, is_valid, close)
        return VersionSource(offer, buffer, lambda *_: num_bytes, lambda _: held.digest, is_valid, close)


def is_trainer(upstream: str) -> bool:
    """Whether an upstream is a rank of the trainer; others are relays."""
    return upstream.startswith("actor")


def watermark(num_bytes: int, num_parts: int, ranges: Mapping[int, ByteRanges], done: Mapping[int, int]) -> int:
    """Bytes of the layout that are in place from its start, when `done` bytes of each part are."""
    if len(ranges) < num_parts:
        return 0
    unfinished = [part for part in ranges if done[part] < ranges[part].num_bytes]
    return min((ranges[part].locate(done[part])[0] for part in unfinished), default=num_bytes)
