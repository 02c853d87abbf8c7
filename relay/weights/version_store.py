"""Where versions come in and go out of one relay: the arriving one, and the complete ones on the shelf.

At most one version arrives at a time. Whoever brings it calls `open`, fills the buffer, tells `advance`, and asks `finish`
to check the digest; whoever sends it on takes `cargo`, which may leave before it has arrived whole. A newer version
supersedes an older one that has not arrived whole; a version that comes again goes on at the byte it had reached.
"""

import logging
import threading
import time

import numpy as np

from ...comm.errors import LinkBroken
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Lock, Segment
from .delta import DeltaCodec, Difference
from .incoming import IncomingState, IncomingVersion
from .slots import READER_LOCK_S, StoredVersion, VersionSlots

_log = logging.getLogger(__name__)
_LOOK_S = 1e-3  # the kernel tells no one that a reader has given its lease back


class VersionStore:
    """The incoming and outgoing versions of one segment; any thread may call."""

    def __init__(self, segment: Segment, lease_s: float = READER_LOCK_S) -> None:
        """`lease_s` bounds the wait for readers when they lease all slots that may be written."""
        self.slots = VersionSlots(segment)
        self._lease_s = lease_s
        self.num_resumed = 0
        """Parts that went on in their middle, over another link than the one on which they had begun."""
        # Bytes come far more often than versions: who waits for a version is not woken by every chunk.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._advanced = threading.Condition(lock)
        self._incoming: IncomingVersion | None = None
        self._differences: dict[int, Difference] = {}
        """The newest version as a difference, if it came as one."""
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """True from `close` on."""
        return self._closed

    # ------------------------------------------------------------------------------------------------- coming in

    def begin_receive(self, offer: Offer, upstream: str) -> tuple[IncomingVersion, int] | None:
        """The place for what is offered and the offset to go on from, whoever brought it before; None if not wanted.

        Raises `WrongDigest` for another layout than that of the versions held, `LinkBroken` when the desk is closed.
        """
        forced_at = time.monotonic() + self._lease_s
        with self._changed:
            while True:
                if self._closed:
                    raise LinkBroken("this relay ends")
                newest, arrival = self.slots.newest(), self._incoming
                if newest is not None and newest >= offer.version:
                    return None
                if arrival is not None and arrival.state is IncomingState.ARRIVING:
                    if arrival.offer.version > offer.version:
                        return None
                    if arrival.offer.identity == offer.identity:
                        break
                if (arrival := self._begin(offer, IncomingState.ARRIVING, forced_at)) is not None:
                    break
            at = arrival.set_upstream(offer, upstream)
            self.num_resumed += at > 0
            self._notify()
            return arrival, at

    def reserve_slot(self, offer: Offer) -> IncomingVersion | None:
        """A slot for an actor to write the next version into ahead of its number; None while a version arrives."""
        forced_at = time.monotonic() + self._lease_s
        with self._changed:
            while not self._closed:
                arrival = self._incoming
                if arrival is not None and arrival.is_open:
                    return arrival if arrival.state is IncomingState.RESERVED else None
                if (arrival := self._begin(offer, IncomingState.RESERVED, forced_at)) is not None:
                    return arrival
            return None

    def bind_reservation(self, offer: Offer, upstream: str, generation: int) -> IncomingVersion | None:
        """The arrival in the slot of this generation, bound to the offered version if it was reserved; None if there is none."""
        with self._changed:
            arrival, newest = self._incoming, self.slots.newest()
            if arrival is None or arrival.slot.generation != generation or not arrival.is_open:
                return None
            if arrival.state is IncomingState.RESERVED:
                if newest is not None and newest >= offer.version:
                    return None
                arrival.bind(offer)
            elif arrival.offer.identity != offer.identity:
                return None
            arrival.set_upstream(offer, upstream)
            return arrival

    def delta_of(self, version: int) -> Difference | None:
        """The difference as which the newest version came, if it did."""
        with self._changed:
            return self._differences.get(version)

    def advance(self, incoming: IncomingVersion, part: int, upstream: str, done: int) -> bool:
        """`upstream` has brought a part up to `done`; False if it is not its to bring any more."""
        with self._changed:
            if not incoming.advance(part, upstream, done):
                return False
            self._advanced.notify_all()
        incoming.update_digest()
        return True

    def finish(self, incoming: IncomingVersion, part: int, digest: str) -> bool:
        """Check a part that is in place; the last right one makes the version readable. False if it has to come again."""
        is_right = incoming.part_digest(part) == digest
        with self._changed:
            if incoming.state is not IncomingState.ARRIVING:
                return incoming.state is IncomingState.COMPLETE
            if not is_right:
                _log.warning(
                    "version %d, part %d: the bytes have not the digest announced", incoming.offer.version, part
                )
                incoming.reset_part(part)
                return False
            incoming.right_parts.add(part)
            if len(incoming.right_parts) < incoming.offer.num_parts:
                return True
        digest, difference = incoming.whole_digest(), incoming.deltas.encode(incoming.buffer, incoming.offer.num_parts)
        with self._changed:
            if incoming.state is IncomingState.ARRIVING:
                self._differences = {} if difference is None else {incoming.offer.version: difference}
                incoming.deltas = DeltaCodec()
                incoming.digest, incoming.state = digest, IncomingState.COMPLETE
                self.slots.commit(incoming.slot, digest)
                self._notify()
        return incoming.state is IncomingState.COMPLETE

    def abandon(self, incoming: IncomingVersion, part: int, upstream: str) -> None:
        """`upstream` has given the version up."""
        with self._changed:
            if incoming.state is IncomingState.ARRIVING and incoming.is_from(part, upstream):
                self._abandon()

    def close(self) -> None:
        """End here and wake everybody. To the next relay this is a broken link: what it has of an arrival stays good."""
        with self._changed:
            self._closed = True
            if self._incoming is not None and self._incoming.is_open:
                self.slots.abort(self._incoming.slot)
            self._incoming = None
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        self._advanced.notify_all()

    def _begin(self, offer: Offer, state: IncomingState, forced_at: float) -> IncomingVersion | None:
        """A slot for what is offered. None after a moment without the lock while readers lease all slots: look again."""
        self.slots.prepare(offer.num_bytes, offer.fingerprint)
        self._abandon()
        slot = self.slots.begin(offer.version, force=time.monotonic() >= forced_at)
        if slot is None:
            self._changed.wait(_LOOK_S)
            return None
        self._incoming = IncomingVersion(offer, slot, state)
        return self._incoming

    def _abandon(self) -> None:
        if self._incoming is not None and self._incoming.is_open:
            self._incoming.state = IncomingState.ABANDONED
            self.slots.abort(self._incoming.slot)
            self._notify()
        self._incoming = None  # its buffer is a view that would hold the segment's memory

    # ------------------------------------------------------------------------------------------------- going out

    def next_source(self, segment: Segment, above: int, timeout_s: float) -> "SlotSource | None":
        """The newest version above `above`, arriving or complete; None if there was none within `timeout_s`.

        `segment` is an opening of the caller's own, whose lease on the slot lasts until the cargo is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._find(above) is not None, timeout_s)
            found = None if self._closed else self._find(above)
        return None if found is None else SlotSource(self, segment, found)

    def source_of(self, segment: Segment, version: int) -> "SlotSource | None":
        """A complete version, by number; None if it is not held (any more)."""
        with self._changed:
            held = self.slots.find(version)
        return None if held is None else SlotSource(self, segment, held)

    def wait_newer(self, version: int, timeout_s: float) -> int | None:
        """The newest complete version if it is above `version`; waits up to `timeout_s` for one."""
        with self._changed:
            self._changed.wait_for(lambda: (self.slots.newest() or 0) > version or self._closed, timeout_s)
            newest = self.slots.newest()
        return newest if newest is not None and newest > version else None

    def wait_bytes_ready(self, incoming: IncomingVersion, beyond: int, timeout_s: float) -> int:
        """Bytes of an arrival in place; waits up to `timeout_s` for more than `beyond`, or for its end."""
        with self._advanced:
            self._advanced.wait_for(
                lambda: incoming.bytes_ready > beyond or not incoming.is_open or self._closed, timeout_s
            )
            return incoming.bytes_ready

    def wait_digest(self, incoming: IncomingVersion, timeout_s: float) -> str | None:
        """The digest of an arrival; waits up to `timeout_s` for its end."""
        with self._advanced:
            self._advanced.wait_for(lambda: not incoming.is_open or self._closed, timeout_s)
            return incoming.digest or None

    def _find(self, above: int) -> IncomingVersion | StoredVersion | None:
        arrival, newest = self._incoming, self.slots.newest_stored()
        is_arriving = arrival is not None and arrival.state is IncomingState.ARRIVING and not arrival.is_delta
        if arrival is not None and is_arriving and arrival.offer.version > above:
            return arrival
        return newest if newest is not None and newest.version > above else None


class SlotSource:
    """A whole version in a slot, on its way to somebody else; leased as soon as it is complete."""

    def __init__(self, version_store: VersionStore, segment: Segment, found: IncomingVersion | StoredVersion) -> None:
        self._version_store = version_store
        self._segment = segment
        self._is_locked = False
        self._stored_digest = found.digest
        if isinstance(found, IncomingVersion):
            self.difference = None
            self._incoming, self._slot = found, found.slot.slot
            self._generations = (found.slot.generation, found.slot.generation + 1)
            self.offer = Offer(found.offer.version, found.offer.num_bytes, found.offer.fingerprint)
        else:
            self.difference = version_store.delta_of(found.version)
            self._incoming, self._slot, self._generations = None, found.slot, (found.generation,)
            self.offer = Offer(found.version, segment.slot_bytes, version_store.slots.fingerprint)
        self._buffer = segment.slot(self._slot)

    def bytes_at(self, at: int, start: int, end: int) -> np.ndarray:
        """Bytes of the slot."""
        return self._buffer[start:end]

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        """Bytes in place."""
        if self._incoming is None:
            return self.offer.num_bytes
        return self._version_store.wait_bytes_ready(self._incoming, beyond, timeout_s)

    def digest(self, timeout_s: float) -> str | None:
        """The digest, once known."""
        if self._incoming is None:
            return self._stored_digest
        return self._version_store.wait_digest(self._incoming, timeout_s)

    def is_valid(self) -> bool:
        """False once the slot holds something else; raises `LinkBroken` when the desk is closed."""
        if self._version_store.is_closed:
            raise LinkBroken("this relay ends")
        if self._incoming is not None and self._incoming.state is IncomingState.ABANDONED:
            return False
        is_complete = self._incoming is None or self._incoming.state is IncomingState.COMPLETE
        if is_complete and not self._is_locked:
            self._is_locked = self._segment.try_lock(self._slot, Lock.SHARED)
        return self._version_store.slots.generation(self._slot) in self._generations

    def close(self) -> None:
        """End the lease."""
        if self._is_locked:
            self._segment.unlock(self._slot, Lock.SHARED)
            self._is_locked = False
