"""Where versions come in and go out of one relay: the arriving one, and the complete ones on the shelf.

At most one version arrives at a time. Whoever brings it calls `open`, fills the buffer, tells `advance`, and asks `finish`
to check the digest; whoever sends it on takes `cargo`, which may leave before it has arrived whole. A newer version
supersedes an older one that has not arrived whole; a version that comes again goes on at the byte it had reached.
"""

import logging
import threading
from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from ..comm.segment import Hold, Segment
from .layout import GRID_BYTES, chunk_digest, join_digests
from .versions import Arriving, Held, Shelf
from .wire import Offer

_log = logging.getLogger(__name__)


class State(Enum):
    """Life of an arrival."""

    ARRIVING = auto()
    COMPLETE = auto()
    ABANDONED = auto()


class Arrival:
    """One version on its way into a slot. `upstream` is who brings it; another may take over."""

    def __init__(self, offer: Offer, slot: Arriving, upstream: str) -> None:
        self.offer = offer
        self.slot = slot
        self.buffer = slot.buffer
        self.upstream = upstream
        self.state = State.ARRIVING
        self.arrived = 0
        self.digest = ""
        self.parts: set[int] = set()
        self._chunks: list[bytes] = []

    def hash_on(self) -> None:
        """Digest the chunks that have arrived whole since the last call."""
        num_bytes = self.offer.num_bytes
        while (start := len(self._chunks) * GRID_BYTES) < num_bytes and min(
            start + GRID_BYTES, num_bytes
        ) <= self.arrived:
            self._chunks.append(chunk_digest(self.buffer, start))

    def computed_digest(self) -> str:
        """The digest of the bytes that are in place; meaningful once all are."""
        self.hash_on()
        return join_digests(self._chunks)

    def restart(self) -> None:
        """Forget what has arrived: it was wrong."""
        self.arrived = 0
        self.parts.clear()
        self._chunks.clear()


class Desk:
    """The incoming and outgoing versions of one segment; any thread may call."""

    def __init__(self, segment: Segment) -> None:
        self.shelf = Shelf(segment)
        self.num_wrong = 0
        """Versions whose bytes were not those of their digest."""
        self._changed = threading.Condition()
        self._arrival: Arrival | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------------- coming in

    def open(self, offer: Offer, upstream: str) -> Arrival | None:
        """The place for an offered version, taken over from whoever brought it before; None if it is not wanted."""
        with self._changed:
            newest, arrival = self.shelf.newest(), self._arrival
            if newest is not None and newest >= offer.version:
                return None
            if arrival is not None and arrival.state is State.ARRIVING:
                if arrival.offer.version > offer.version:
                    return None
                if arrival.offer == offer:
                    arrival.upstream = upstream
                    return arrival
                self._abandon(arrival)
            self.shelf.prepare(offer.num_bytes, offer.fingerprint)
            self._arrival = Arrival(offer, self.shelf.begin(offer.version, offer.step), upstream)
            self._changed.notify_all()
            return self._arrival

    def advance(self, arrival: Arrival, upstream: str, arrived: int) -> bool:
        """`upstream` has filled the buffer up to `arrived`; False if somebody else brings it now or nobody any more."""
        with self._changed:
            if arrival.state is not State.ARRIVING or arrival.upstream != upstream:
                return False
            arrival.arrived = max(arrival.arrived, arrived)
            self._changed.notify_all()
        arrival.hash_on()
        return True

    def add_part(self, arrival: Arrival, part: int) -> bool:
        """One of the parts is in place and right; True once the version is complete."""
        with self._changed:
            arrival.parts.add(part)
            if len(arrival.parts) < arrival.offer.num_parts or arrival.state is not State.ARRIVING:
                return False
            arrival.arrived = arrival.offer.num_bytes
            self._changed.notify_all()
        return self.finish(arrival, arrival.computed_digest())

    def finish(self, arrival: Arrival, digest: str) -> bool:
        """Make the version readable if its bytes have the announced digest; else it has to come again."""
        is_right = arrival.computed_digest() == digest
        with self._changed:
            if arrival.state is not State.ARRIVING:
                return arrival.state is State.COMPLETE and arrival.digest == digest
            if is_right:
                arrival.digest, arrival.state = digest, State.COMPLETE
                self.shelf.complete(arrival.slot, digest)
            else:
                self.num_wrong += 1
                _log.warning("version %d from %s has not its digest", arrival.offer.version, arrival.upstream)
                arrival.restart()
            self._changed.notify_all()
        return is_right

    def abandon(self, arrival: Arrival, upstream: str) -> None:
        """`upstream` has given the version up."""
        with self._changed:
            if arrival.state is State.ARRIVING and arrival.upstream == upstream:
                self._abandon(arrival)
                self._changed.notify_all()

    def current(self, version: int) -> Arrival | None:
        """The arrival of a version, if that is what is arriving."""
        with self._changed:
            arrival = self._arrival
            return arrival if arrival is not None and arrival.offer.version == version else None

    def close(self) -> None:
        """Give up what is arriving and wake everybody."""
        with self._changed:
            self._closed = True
            if self._arrival is not None and self._arrival.state is State.ARRIVING:
                self._abandon(self._arrival)
            self._arrival = None  # its buffer is a view that would hold the segment's memory
            self._changed.notify_all()

    def _abandon(self, arrival: Arrival) -> None:
        arrival.state = State.ABANDONED
        self.shelf.abandon(arrival.slot)

    # ------------------------------------------------------------------------------------------------- going out

    def cargo(self, segment: Segment, above: int, timeout_s: float) -> "SlotCargo | None":
        """The newest version above `above`, arriving or complete; None if there was none within `timeout_s`.

        `segment` is an opening of the caller's own, whose lease on the slot lasts until the cargo is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._find(above) is not None, timeout_s)
            found = None if self._closed else self._find(above)
        return None if found is None else SlotCargo(self, segment, found)

    def _find(self, above: int) -> "Arrival | Held | None":
        arrival, newest = self._arrival, self.shelf.newest_held()
        if arrival is not None and arrival.state is State.ARRIVING and arrival.offer.version > above:
            return arrival
        return newest if newest is not None and newest.version > above else None

    def wait_arrived(self, arrival: Arrival, beyond: int, timeout_s: float) -> int:
        """Bytes of an arrival in place; waits up to `timeout_s` for more than `beyond`, or for its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: arrival.arrived > beyond or arrival.state is not State.ARRIVING or self._closed, timeout_s
            )
            return arrival.arrived

    def wait_digest(self, arrival: Arrival, timeout_s: float) -> str | None:
        """The digest of an arrival; waits up to `timeout_s` for its end."""
        with self._changed:
            self._changed.wait_for(lambda: arrival.state is not State.ARRIVING or self._closed, timeout_s)
            return arrival.digest or None


class SlotCargo:
    """A version in a slot, on its way to somebody else; leased as soon as it is complete."""

    def __init__(self, desk: Desk, segment: Segment, found: Arrival | Held) -> None:
        self._desk = desk
        self._segment = segment
        self._arrival = found if isinstance(found, Arrival) else None
        self._slot = found.slot.slot if isinstance(found, Arrival) else found.slot
        self._generations: Sequence[int]
        if isinstance(found, Arrival):
            self.offer = found.offer
            self._generations = (found.slot.generation, found.slot.generation + 1)
        else:
            self.offer = Offer(found.version, found.step, segment.slot_bytes, desk.shelf.fingerprint)
            self._generations = (found.generation,)
        self._held_digest = found.digest
        self.buffer: np.ndarray = segment.slot(self._slot)
        self._is_leased = False

    def arrived(self, beyond: int, timeout_s: float) -> int:
        """Bytes in place."""
        if self._arrival is None:
            self._lease()
            return self.offer.num_bytes
        return self._desk.wait_arrived(self._arrival, beyond, timeout_s)

    def digest(self, timeout_s: float) -> str | None:
        """The digest, once known."""
        if self._arrival is None:
            return self._held_digest
        return self._desk.wait_digest(self._arrival, timeout_s)

    def is_still(self) -> bool:
        """False once the slot holds something else."""
        if self._arrival is not None and self._arrival.state is State.ABANDONED:
            return False
        if self._arrival is not None and self._arrival.state is State.COMPLETE:
            self._lease()
        return self._desk.shelf.generation(self._slot) in self._generations

    def close(self) -> None:
        """End the lease."""
        if self._is_leased:
            self._segment.give_back(self._slot, Hold.LEASE)
            self._is_leased = False

    def _lease(self) -> None:
        self._is_leased = self._is_leased or self._segment.take(self._slot, Hold.LEASE)
