"""The versions of one relay: the one that arrives, and the complete ones in the slots.

At most one version arrives at a time. Its sender's thread calls `begin_receive`, fills the buffer, calls `advance`, and at
the end `finish`, which checks the digest. Threads that send it on call `next_source`, also before it has arrived whole. A
newer version supersedes an older one that has not arrived whole; a version that is offered again continues at the byte that
it had reached.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from ...comm.errors import LinkBroken
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Segment
from .incoming import IncomingVersion, is_trainer
from .slots import READER_LOCK_S, StoredVersion, VersionSlots

_log = logging.getLogger(__name__)
_POLL_S = 1e-3  # the kernel does not notify of a lock that a reader gives back


class SlotSource:
    """A version of a store that is sent on, complete or still arriving. Until `close` it holds its slot as a reader does."""

    def __init__(self, store: "VersionStore", found: IncomingVersion | StoredVersion) -> None:
        self._store = store
        self._incoming = found if isinstance(found, IncomingVersion) else None
        held = found.slot if isinstance(found, IncomingVersion) else found
        self._digest = held.digest
        self.slot = held.slot
        self._generations = (held.generation, held.generation + (self._incoming is not None))
        slots = store.slots
        self.offer = Offer(held.version, slots.segment.slot_bytes, slots.fingerprint, incarnation=held.incarnation)
        self.buffer = slots.segment.slot(held.slot)

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        return self.offer.num_bytes if self._incoming is None else self._incoming.wait_bytes_ready(beyond, timeout_s)

    def digest(self, timeout_s: float) -> str | None:
        return self._digest if self._incoming is None else self._incoming.wait_digest(timeout_s)

    def is_valid(self) -> bool:
        """False once the slot holds something else; raises `LinkBroken` when the store is closed."""
        if self._store.closed:
            raise LinkBroken("this relay ends")
        if self._incoming is not None and self._incoming.is_abandoned:
            return False
        return self._store.slots.generation(self.slot) in self._generations

    def close(self) -> None:
        self._store.end_use(self.slot)


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

    def next_source(self, above: int, timeout_s: float) -> SlotSource | None:
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

    def source_of(self, version: int) -> SlotSource | None:
        """A complete version by its number, which the caller closes; None if it is not stored."""
        with self._changed:
            return self._source(self.slots.find(version))

    def _source(self, found: IncomingVersion | StoredVersion | None) -> SlotSource | None:
        if found is None:
            return None
        source = SlotSource(self, found)
        self._num_sending[source.slot] += 1
        return source

    def end_use(self, slot: int) -> None:
        """A source of this slot is closed."""
        with self._changed:
            self._num_sending[slot] -= 1
