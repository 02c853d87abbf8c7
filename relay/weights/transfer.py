"""Carrying versions between a link and a desk: taking in what the other side offers, sending on what arrives here."""

import threading
import time
from collections.abc import Callable

import numpy as np

from ...comm.errors import LinkBroken
from ...comm.links.opening import Link
from ...comm.messages.weights import Delta, Offer
from ...comm.shared_memory import Segment
from .chunks import ChunkSizer
from .digests import digest
from .frames import Accept, FrameKind, Trailer, TransferAck, ranges_of
from .incoming import IncomingVersion
from .protocol import (
    IDLE_S,
    SILENCE_S,
    receive_frame,
    receive_header,
    receive_struct,
    send_frame,
    send_idle,
    send_version,
)
from .version_store import VersionStore


def receive_versions(
    link: Link,
    version_store: VersionStore,
    upstream: str,
    is_closing: Callable[[], bool],
    on_complete: Callable[[IncomingVersion], None],
) -> None:
    """Take in whatever `upstream` offers, until the link breaks or this process closes.

    Consumes offers and their bytes; waits for the link alone; woken by frames, idle ones included.
    """
    while not is_closing():
        kind, num_bytes = receive_header(link, SILENCE_S)
        if kind is FrameKind.IDLE:
            continue
        offer = receive_struct(link, num_bytes, SILENCE_S)
        if not isinstance(offer, Offer):
            raise LinkBroken(f"{type(offer).__name__} from {upstream} where an offer was due")
        opened = version_store.begin_receive(offer, upstream)
        if opened is None:
            send_frame(link, Accept(-1), SILENCE_S)
            continue
        arrival, at = opened
        takes_delta = at == 0 and arrival.deltas.accept(offer, version_store.slots)
        send_frame(link, Accept(at, takes_delta), SILENCE_S)
        if takes_delta and offer.delta is not None:
            at = _receive_delta(link, version_store, arrival, offer, offer.delta, upstream)
        if _receive_part(link, version_store, arrival, offer, at, upstream):
            on_complete(arrival)


def _receive_delta(
    link: Link, version_store: VersionStore, incoming: IncomingVersion, offer: Offer, delta: Delta, upstream: str
) -> int:
    """Take a difference in, and make the version of it; returns the bytes that are in place then, which is all."""
    changes, at = np.empty(delta.num_bytes, np.uint8), 0
    while at < changes.nbytes:
        kind, num_bytes = receive_header(link, SILENCE_S)
        if kind is not FrameKind.DATA or at + num_bytes > changes.nbytes:
            raise LinkBroken(f"{upstream} offered a delta and sent something else")
        link.receive(changes[at : at + num_bytes], SILENCE_S)
        at += num_bytes
    done = ranges_of(offer).num_bytes
    is_applied = incoming.deltas.apply(offer, delta, changes, incoming.buffer, version_store.slots)
    if not is_applied or not version_store.advance(incoming, offer.part, upstream, done):
        raise LinkBroken(f"the delta of version {offer.version} from {upstream} does not fit")
    return done


def _receive_part(
    link: Link, version_store: VersionStore, incoming: IncomingVersion, offer: Offer, at: int, upstream: str
) -> bool:
    """Fill a part from `at` on; True once it is right, False if it was given up or has to come again."""
    ranges = ranges_of(offer)
    while True:
        kind, num_bytes = receive_header(link, SILENCE_S)
        if kind is FrameKind.DATA:
            start, end = ranges.locate(at)
            if start + num_bytes > end:
                raise LinkBroken(f"{upstream} sends more of version {offer.version} than it offered")
            link.receive(incoming.buffer[start : start + num_bytes], SILENCE_S)
            at += num_bytes
            if not version_store.advance(incoming, offer.part, upstream, at):
                raise LinkBroken(f"version {offer.version} is no longer taken from {upstream}")
        elif kind is FrameKind.STRUCT:
            trailer = receive_struct(link, num_bytes, SILENCE_S)
            if not isinstance(trailer, Trailer):
                raise LinkBroken(f"{type(trailer).__name__} from {upstream} where a trailer was due")
            if not trailer.digest:
                version_store.abandon(incoming, offer.part, upstream)
                return False
            is_right = version_store.finish(incoming, offer.part, trailer.digest)
            send_frame(link, TransferAck(is_right), SILENCE_S)
            return is_right


def receive_version(link: Link, into: np.ndarray) -> str | None:
    """Take one version into a buffer, uint8 [num_bytes]: its digest, or None if the other side does not hold it. Raises `LinkBroken`."""
    _, num_bytes = receive_header(link, SILENCE_S)
    offer = receive_struct(link, num_bytes, SILENCE_S)
    if not isinstance(offer, Offer):
        return None
    if offer.num_bytes != into.nbytes:
        raise LinkBroken(f"version {offer.version} has {offer.num_bytes} bytes, not {into.nbytes}")
    send_frame(link, Accept(0), SILENCE_S)
    at = 0
    while at < into.nbytes:
        kind, num_bytes = receive_header(link, SILENCE_S)
        if kind is FrameKind.STRUCT or at + num_bytes > into.nbytes:
            raise LinkBroken(f"version {offer.version} was overwritten on its way")
        link.receive(into[at : at + num_bytes], SILENCE_S)
        at += num_bytes
    trailer = receive_frame(link, Trailer, SILENCE_S)
    is_right = digest(into) == trailer.digest
    send_frame(link, TransferAck(is_right), SILENCE_S)
    if not is_right:
        raise LinkBroken(f"version {offer.version} arrived wrong")
    return trailer.digest


class VersionSender:
    """Sends each new version of a desk over one link, until the link breaks or `stop` is set."""

    def __init__(
        self, version_store: VersionStore, segment_path: str, stop: threading.Event, chunk_sizer: ChunkSizer
    ) -> None:
        self.num_nodes = 2
        """Nodes of the chain that this link is part of."""
        self._chunk_sizer = chunk_sizer
        self._version_store = version_store
        # An opening of its own, for leases that stand against the writer's; mapping it takes too long to do it in a repair.
        self._segment = Segment.open(segment_path)
        self._stop = stop

    def send_all(self, link: Link, is_wanted: Callable[[], bool]) -> None:
        """Send on. Consumes versions of the desk; waits for the next; woken by its arrival. Raises `LinkBroken`."""
        sent = -1
        while not self._stop.is_set() and is_wanted():
            cargo = self._version_store.next_source(self._segment, sent, IDLE_S / 2)
            if cargo is None:
                send_idle(link, SILENCE_S)
                continue
            try:
                num_bytes, started = cargo.offer.num_bytes, time.monotonic()
                if send_version(link, cargo, SILENCE_S, self._chunk_sizer.chunk_bytes(self.num_nodes, num_bytes)):
                    sent = cargo.offer.version
                    self._chunk_sizer.record(num_bytes, time.monotonic() - started)
            finally:
                cargo.close()

    def send_one(self, link: Link, version: int) -> None:
        """Send one complete version if it is still held, else an empty trailer."""
        cargo = self._version_store.source_of(self._segment, version)
        if cargo is None:
            send_frame(link, Trailer(""), SILENCE_S)
            return
        try:
            send_version(link, cargo, SILENCE_S)
        finally:
            cargo.close()

    def close(self) -> None:
        """Let go of the segment."""
        self._segment.close()
