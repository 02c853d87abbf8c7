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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ...comm.errors import LinkBroken
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Lock, Segment
from .incoming import IncomingState, IncomingVersion, is_trainer
from .slots import READER_LOCK_S, StoredVersion, VersionSlots

_log = logging.getLogger(__name__)
_POLL_S = 1e-3  # the kernel does not notify of a lock that a reader gives back


class SlotSource:
    """A version to send, complete or still arriving; its slot is locked for reading as soon as it is complete.

    It reads the store's segment through an opening of the caller's, `slots`, and writes nothing.
    """

    def __init__(
        self,
        slots: VersionSlots,
        found: IncomingVersion | StoredVersion,
        is_closed: Callable[[], bool],
    ) -> None:
        self._incoming = found if isinstance(found, IncomingVersion) else None
        held = found.slot if isinstance(found, IncomingVersion) else found
        incarnation = found.offer.incarnation if isinstance(found, IncomingVersion) else found.incarnation
        self.offer = Offer(held.version, slots.segment.slot_bytes, slots.fingerprint, incarnation=incarnation)
        self._slots = slots
        self._slot = held.slot
        self._generations = (held.generation, held.generation + (self._incoming is not None))
        self._digest = held.digest
        self._is_closed = is_closed
        self._is_locked = False
        self._buffer = slots.segment.slot(held.slot)

    def bytes_at(self, at: int, start: int, end: int) -> np.ndarray:
        return self._buffer[start:end]

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        return self.offer.num_bytes if self._incoming is None else self._incoming.wait_bytes_ready(beyond, timeout_s)

    def digest(self, timeout_s: float) -> str | None:
        return self._digest if self._incoming is None else self._incoming.wait_digest(timeout_s)

    def is_valid(self) -> bool:
        """False once the slot holds something else; raises `LinkBroken` when the store is closed."""
        if self._is_closed():
            raise LinkBroken("this relay is ending")
        if self._incoming is not None and self._incoming.state is IncomingState.ABANDONED:
            return False
        if not self._is_locked and (self._incoming is None or not self._incoming.is_open):
            self._is_locked = self._slots.segment.try_lock(self._slot, Lock.SHARED)
        return self._slots.generation(self._slot) in self._generations

    def close(self) -> None:
        if self._is_locked:
            self._slots.segment.unlock(self._slot, Lock.SHARED)
            self._is_locked = False


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
        """The version that is on its way in, or for which a slot is reserved."""
        self._trainer_incarnation = 0
        self._num_filling: Counter[int] = Counter()
        """Threads that write a piece into each slot."""
        self._closed = False

    def close(self) -> None:
        """Abandon the incoming version and wake all waits. The next relay sees a broken link and keeps what it received."""
        with self._changed:
            self._closed = True
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
                if self._closed:
                    raise LinkBroken("this relay is ending")
                if is_trainer(upstream):
                    self._check_incarnation(offer)
                newest = self.slots.newest()
                incoming = self.incoming
                if newest is not None and newest >= offer.version:
                    return None
                if incoming is not None and incoming.state is IncomingState.ARRIVING:
                    if incoming.offer.identity == offer.identity:
                        break
                    if incoming.offer.identity[:2] > offer.identity[:2]:
                        return None
                if (incoming := self._begin(offer, IncomingState.ARRIVING, forced_at)) is not None:
                    break
            at = incoming.set_upstream(offer, upstream)
            self.num_resumed += at > 0
            self._notify()
            return incoming, at

    def reserve_slot(self, offer: Offer) -> IncomingVersion | None:
        """A slot that an actor may write the next version into before its number is known; None while a version arrives."""
        forced_at = time.monotonic() + self._reader_lock_s
        with self._changed:
            while not self._closed:
                self._check_incarnation(offer)
                incoming = self.incoming
                if incoming is not None and incoming.is_open:
                    return incoming if incoming.state is IncomingState.RESERVED else None
                if (incoming := self._begin(offer, IncomingState.RESERVED, forced_at)) is not None:
                    return incoming
            return None

    def bind_reservation(self, offer: Offer, upstream: str, generation: int) -> IncomingVersion | None:
        """The incoming version in the slot of this generation, bound to the offer if it was reserved; None if it is gone."""
        with self._changed:
            incoming = self.incoming
            newest = self.slots.newest()
            if incoming is None or incoming.slot.generation != generation or not incoming.is_open:
                return None
            if incoming.state is IncomingState.RESERVED:
                if newest is not None and newest >= offer.version:
                    return None
                incoming.bind(offer)
            elif incoming.offer.identity != offer.identity:
                return None
            incoming.set_upstream(offer, upstream)
            return incoming

    @contextmanager
    def filling(self, incoming: IncomingVersion) -> Iterator[None]:
        """No other version begins in this slot while the body writes a piece, which may last longer than its version is wanted.

        Raises `LinkBroken` if the version is not wanted any more.
        """
        slot = incoming.slot.slot
        with self._changed:
            if not incoming.is_open:
                raise LinkBroken(f"version {incoming.offer.version} is no longer wanted")
            self._num_filling[slot] += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_filling[slot] -= 1

    def advance(self, incoming: IncomingVersion, part: int, upstream: str, done: int) -> bool:
        """`done` bytes of a part are in place; False if `upstream` may no longer send the part."""
        with self._changed:
            if not incoming.advance(part, upstream, done):
                return False
            self._advanced.notify_all()
        incoming.update_digest()
        return True

    def finish(self, incoming: IncomingVersion, part: int, digest: str) -> bool:
        """Check a part that is in place; the last right part makes the version readable. False if the part must come again.

        Digests take long, so they are computed without the lock, and the state is checked again under the lock.
        """
        is_right = incoming.part_digest(part) == digest
        with self._changed:
            if incoming.state is not IncomingState.ARRIVING:
                return incoming.state is IncomingState.COMPLETE
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
            if incoming.state is IncomingState.ARRIVING and incoming.is_checked and whole:
                incoming.digest = whole
                incoming.state = IncomingState.COMPLETE
                self.slots.commit(incoming.slot, whole, incoming.offer.incarnation)
                self._notify()
            return incoming.state is not IncomingState.ABANDONED

    def abandon(self, incoming: IncomingVersion, part: int, upstream: str) -> None:
        """Abandon a version because `upstream`, which sends this part, has."""
        with self._changed:
            if incoming.state is IncomingState.ARRIVING and incoming.is_from(part, upstream):
                self._abandon()

    def _check_incarnation(self, offer: Offer) -> None:
        self.fence(offer.incarnation)
        if offer.incarnation < self._trainer_incarnation:
            raise LinkBroken(
                f"incarnation {offer.incarnation} of the trainer is fenced: {self._trainer_incarnation} has started"
            )

    def _begin(self, offer: Offer, state: IncomingState, forced_at: float) -> IncomingVersion | None:
        """A slot for an offer. While readers lock all slots, waits a moment without the store's lock, and returns None."""
        self.slots.prepare(offer.num_bytes, offer.fingerprint)
        self._abandon()
        slot = self.slots.begin(offer.version, force=time.monotonic() >= forced_at, busy=+self._num_filling)
        if slot is None:
            self._changed.wait(_POLL_S)
            return None
        self.incoming = IncomingVersion(offer, slot, self.slots.segment.slot(slot.slot), state, self._advanced)
        return self.incoming

    def _abandon(self) -> None:
        if self.incoming is not None and self.incoming.is_open:
            self.incoming.state = IncomingState.ABANDONED
            self.slots.abort(self.incoming.slot)
            self._notify()
        self.incoming = None  # its buffer is a view that would hold the segment's memory

    def _notify(self) -> None:
        self._changed.notify_all()
        self._advanced.notify_all()

    def next_source(self, slots: VersionSlots, above: int, timeout_s: float) -> SlotSource | None:
        """The newest version above `above`, arriving or complete; None if none comes within `timeout_s`.

        `slots` belong to the caller's own opening of the segment; the caller closes the source.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._find(above) is not None, timeout_s)
            found = None if self._closed else self._find(above)
            return None if found is None else SlotSource(slots, found, lambda: self._closed)

    def source_of(self, slots: VersionSlots, version: int) -> SlotSource | None:
        """A complete version by its number; None if it is not stored."""
        with self._changed:
            stored = self.slots.find(version)
            return None if stored is None else SlotSource(slots, stored, lambda: self._closed)

    def wait_newer(self, version: int, timeout_s: float) -> int | None:
        """The newest complete version; None if it is not above `version` within `timeout_s`."""

        def newer() -> int | None:
            newest = self.slots.newest()
            return newest if newest is not None and newest > version else None

        with self._changed:
            self._changed.wait_for(lambda: self._closed or newer() is not None, timeout_s)
            return newer()

    def _find(self, above: int) -> IncomingVersion | StoredVersion | None:
        incoming = self.incoming
        newest = self.slots.newest_stored()
        is_arriving = incoming is not None and incoming.state is IncomingState.ARRIVING
        if incoming is not None and is_arriving and incoming.offer.version > above:
            return incoming
        return newest if newest is not None and newest.version > above else None
