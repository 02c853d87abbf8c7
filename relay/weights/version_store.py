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
from ...comm.messages.offer import Offer
from ...comm.shared_memory import Hold, Segment
from .delta import DeltaCodec, Difference
from .incoming import Arrival, State
from .slots import LEASE_S, Held, Shelf

_log = logging.getLogger(__name__)
_LOOK_S = 1e-3  # the kernel tells no one that a reader has given its lease back


class Desk:
    """The incoming and outgoing versions of one segment; any thread may call."""

    def __init__(self, segment: Segment, lease_s: float = LEASE_S) -> None:
        """`lease_s` bounds the wait for readers when they lease all slots that may be written."""
        self.shelf = Shelf(segment)
        self._lease_s = lease_s
        self.num_resumed = 0
        """Parts that went on in their middle, over another link than the one on which they had begun."""
        # Bytes come far more often than versions: who waits for a version is not woken by every chunk.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._advanced = threading.Condition(lock)
        self._arrival: Arrival | None = None
        self._differences: dict[int, Difference] = {}
        """The newest version as a difference, if it came as one."""
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """True from `close` on."""
        return self._closed

    # ------------------------------------------------------------------------------------------------- coming in

    def open(self, offer: Offer, upstream: str) -> tuple[Arrival, int] | None:
        """The place for what is offered and the offset to go on from, whoever brought it before; None if not wanted.

        Raises `WrongDigest` for another layout than that of the versions held, `LinkBroken` when the desk is closed.
        """
        forced_at = time.monotonic() + self._lease_s
        with self._changed:
            while True:
                if self._closed:
                    raise LinkBroken("this relay ends")
                newest, arrival = self.shelf.newest(), self._arrival
                if newest is not None and newest >= offer.version:
                    return None
                if arrival is not None and arrival.state is State.ARRIVING:
                    if arrival.offer.version > offer.version:
                        return None
                    if arrival.offer.identity == offer.identity:
                        break
                if (arrival := self._begin(offer, State.ARRIVING, forced_at)) is not None:
                    break
            at = arrival.take_over(offer, upstream)
            self.num_resumed += at > 0
            self._notify()
            return arrival, at

    def reserve(self, offer: Offer) -> Arrival | None:
        """A slot for an actor to write the next version into ahead of its number; None while a version arrives."""
        forced_at = time.monotonic() + self._lease_s
        with self._changed:
            while not self._closed:
                arrival = self._arrival
                if arrival is not None and arrival.is_open:
                    return arrival if arrival.state is State.RESERVED else None
                if (arrival := self._begin(offer, State.RESERVED, forced_at)) is not None:
                    return arrival
            return None

    def bind(self, offer: Offer, upstream: str, generation: int) -> Arrival | None:
        """The arrival in the slot of this generation, bound to the offered version if it was reserved; None if there is none."""
        with self._changed:
            arrival, newest = self._arrival, self.shelf.newest()
            if arrival is None or arrival.slot.generation != generation or not arrival.is_open:
                return None
            if arrival.state is State.RESERVED:
                if newest is not None and newest >= offer.version:
                    return None
                arrival.bind(offer)
            elif arrival.offer.identity != offer.identity:
                return None
            arrival.take_over(offer, upstream)
            return arrival

    def delta_of(self, version: int) -> Difference | None:
        """The difference as which the newest version came, if it did."""
        with self._changed:
            return self._differences.get(version)

    def advance(self, arrival: Arrival, part: int, upstream: str, done: int) -> bool:
        """`upstream` has brought a part up to `done`; False if it is not its to bring any more."""
        with self._changed:
            if not arrival.advance(part, upstream, done):
                return False
            self._advanced.notify_all()
        arrival.hash_on()
        return True

    def finish(self, arrival: Arrival, part: int, digest: str) -> bool:
        """Check a part that is in place; the last right one makes the version readable. False if it has to come again."""
        is_right = arrival.part_digest(part) == digest
        with self._changed:
            if arrival.state is not State.ARRIVING:
                return arrival.state is State.COMPLETE
            if not is_right:
                _log.warning(
                    "version %d, part %d: the bytes have not the digest announced", arrival.offer.version, part
                )
                arrival.restart(part)
                return False
            arrival.right_parts.add(part)
            if len(arrival.right_parts) < arrival.offer.num_parts:
                return True
        digest, difference = arrival.whole_digest(), arrival.deltas.encode(arrival.buffer, arrival.offer.num_parts)
        with self._changed:
            if arrival.state is State.ARRIVING:
                self._differences = {} if difference is None else {arrival.offer.version: difference}
                arrival.deltas = DeltaCodec()
                arrival.digest, arrival.state = digest, State.COMPLETE
                self.shelf.complete(arrival.slot, digest)
                self._notify()
        return arrival.state is State.COMPLETE

    def abandon(self, arrival: Arrival, part: int, upstream: str) -> None:
        """`upstream` has given the version up."""
        with self._changed:
            if arrival.state is State.ARRIVING and arrival.is_brought_by(part, upstream):
                self._abandon()

    def close(self) -> None:
        """End here and wake everybody. To the next relay this is a broken link: what it has of an arrival stays good."""
        with self._changed:
            self._closed = True
            if self._arrival is not None and self._arrival.is_open:
                self.shelf.abandon(self._arrival.slot)
            self._arrival = None
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        self._advanced.notify_all()

    def _begin(self, offer: Offer, state: State, forced_at: float) -> Arrival | None:
        """A slot for what is offered. None after a moment without the lock while readers lease all slots: look again."""
        self.shelf.prepare(offer.num_bytes, offer.fingerprint)
        self._abandon()
        slot = self.shelf.begin(offer.version, force=time.monotonic() >= forced_at)
        if slot is None:
            self._changed.wait(_LOOK_S)
            return None
        self._arrival = Arrival(offer, slot, state)
        return self._arrival

    def _abandon(self) -> None:
        if self._arrival is not None and self._arrival.is_open:
            self._arrival.state = State.ABANDONED
            self.shelf.abandon(self._arrival.slot)
            self._notify()
        self._arrival = None  # its buffer is a view that would hold the segment's memory

    # ------------------------------------------------------------------------------------------------- going out

    def cargo(self, segment: Segment, above: int, timeout_s: float) -> "SlotCargo | None":
        """The newest version above `above`, arriving or complete; None if there was none within `timeout_s`.

        `segment` is an opening of the caller's own, whose lease on the slot lasts until the cargo is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._find(above) is not None, timeout_s)
            found = None if self._closed else self._find(above)
        return None if found is None else SlotCargo(self, segment, found)

    def complete_cargo(self, segment: Segment, version: int) -> "SlotCargo | None":
        """A complete version, by number; None if it is not held (any more)."""
        with self._changed:
            held = self.shelf.find(version)
        return None if held is None else SlotCargo(self, segment, held)

    def wait_newer(self, version: int, timeout_s: float) -> int | None:
        """The newest complete version if it is above `version`; waits up to `timeout_s` for one."""
        with self._changed:
            self._changed.wait_for(lambda: (self.shelf.newest() or 0) > version or self._closed, timeout_s)
            newest = self.shelf.newest()
        return newest if newest is not None and newest > version else None

    def wait_arrived(self, arrival: Arrival, beyond: int, timeout_s: float) -> int:
        """Bytes of an arrival in place; waits up to `timeout_s` for more than `beyond`, or for its end."""
        with self._advanced:
            self._advanced.wait_for(lambda: arrival.arrived > beyond or not arrival.is_open or self._closed, timeout_s)
            return arrival.arrived

    def wait_digest(self, arrival: Arrival, timeout_s: float) -> str | None:
        """The digest of an arrival; waits up to `timeout_s` for its end."""
        with self._advanced:
            self._advanced.wait_for(lambda: not arrival.is_open or self._closed, timeout_s)
            return arrival.digest or None

    def _find(self, above: int) -> Arrival | Held | None:
        arrival, newest = self._arrival, self.shelf.newest_held()
        is_arriving = arrival is not None and arrival.state is State.ARRIVING and not arrival.is_delta
        if arrival is not None and is_arriving and arrival.offer.version > above:
            return arrival
        return newest if newest is not None and newest.version > above else None


class SlotCargo:
    """A whole version in a slot, on its way to somebody else; leased as soon as it is complete."""

    def __init__(self, desk: Desk, segment: Segment, found: Arrival | Held) -> None:
        self._desk = desk
        self._segment = segment
        self._is_leased = False
        self._held_digest = found.digest
        if isinstance(found, Arrival):
            self.difference = None
            self._arrival, self._slot = found, found.slot.slot
            self._generations = (found.slot.generation, found.slot.generation + 1)
            self.offer = Offer(found.offer.version, found.offer.num_bytes, found.offer.fingerprint)
        else:
            self.difference = desk.delta_of(found.version)
            self._arrival, self._slot, self._generations = None, found.slot, (found.generation,)
            self.offer = Offer(found.version, segment.slot_bytes, desk.shelf.fingerprint)
        self._buffer = segment.slot(self._slot)

    def view(self, at: int, start: int, end: int) -> np.ndarray:
        """Bytes of the slot."""
        return self._buffer[start:end]

    def arrived(self, beyond: int, timeout_s: float) -> int:
        """Bytes in place."""
        if self._arrival is None:
            return self.offer.num_bytes
        return self._desk.wait_arrived(self._arrival, beyond, timeout_s)

    def digest(self, timeout_s: float) -> str | None:
        """The digest, once known."""
        if self._arrival is None:
            return self._held_digest
        return self._desk.wait_digest(self._arrival, timeout_s)

    def is_still(self) -> bool:
        """False once the slot holds something else; raises `LinkBroken` when the desk is closed."""
        if self._desk.is_closed:
            raise LinkBroken("this relay ends")
        if self._arrival is not None and self._arrival.state is State.ABANDONED:
            return False
        is_complete = self._arrival is None or self._arrival.state is State.COMPLETE
        if is_complete and not self._is_leased:
            self._is_leased = self._segment.take(self._slot, Hold.LEASE)
        return self._desk.shelf.generation(self._slot) in self._generations

    def close(self) -> None:
        """End the lease."""
        if self._is_leased:
            self._segment.give_back(self._slot, Hold.LEASE)
            self._is_leased = False
