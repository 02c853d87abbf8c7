"""Versions between a link and a version store: a receiver stores what the other end offers, a sender sends its versions on.

The size of a chunk is by Laminar's model, in seconds and bytes. With p nodes (the sender included), M bytes in k chunks, and a
chunk costing M / k * T_byte + T_start per hop, the last node has the last chunk after T(k) = (p + k - 2) * (M * T_byte / k + T_start).
With few chunks the nodes behind wait long; many chunks cost start-ups.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from ...comm.errors import LinkBroken
from ...comm.links.base import Link
from ...comm.links.frames import FrameKind, receive_frame, receive_head, send_frame, send_idle
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Segment
from ...comm.trace import failpoint
from .byte_ranges import digest, ranges_of
from .protocol import (
    IDLE_S,
    OFFERS,
    OFFERS_OR_NONE,
    SILENCE_S,
    TRAILERS,
    Accept,
    Trailer,
    TransferAck,
    VersionSource,
    send_version,
)
from .slots import VersionSlots

if TYPE_CHECKING:
    from .incoming import IncomingVersion
    from .version_store import VersionStore

START_S = 400e-6
"""Seconds that a data frame costs besides its bytes: headers, wake-ups and Python at both ends."""
_FIRST_BYTE_S = 1 / 2e9  # before the link's speed is known
CHUNK_RANGE = (64 << 10, 32 << 20)
"""Bytes of the smallest and the largest chunk that links carry well."""


def receive_versions(
    link: Link,
    version_store: "VersionStore",
    upstream: str,
    is_closing: Callable[[], bool],
    on_complete: Callable[["IncomingVersion"], None],
) -> None:
    """Store the versions that `upstream` offers, until the link breaks or this process closes.

    Consumes offers and their bytes; waits for the link alone; woken by frames, idle ones included.
    """
    while not is_closing():
        head = receive_head(link, SILENCE_S)
        if head.kind is FrameKind.IDLE:
            continue
        offer = receive_frame(link, OFFERS, SILENCE_S, head)
        opened = version_store.begin_receive(offer, upstream)
        if opened is None:
            send_frame(link, Accept(-1), SILENCE_S)
            continue
        incoming, at = opened
        send_frame(link, Accept(at), SILENCE_S)
        if _receive_part(link, version_store, incoming, offer, at, upstream):
            on_complete(incoming)


def _receive_part(
    link: Link, version_store: "VersionStore", incoming: "IncomingVersion", offer: Offer, at: int, upstream: str
) -> bool:
    """Fill a part from `at` on; True once it is right, False if it was abandoned or must come again."""
    ranges = ranges_of(offer)
    while True:
        kind, num_bytes = head = receive_head(link, SILENCE_S)
        if kind is FrameKind.DATA:
            start, end = ranges.locate(at)
            if start + num_bytes > end:
                raise LinkBroken(f"{upstream} sends more of version {offer.version} than it offered")
            with version_store.filling(incoming):
                link.receive(incoming.buffer[start : start + num_bytes], SILENCE_S)
            at += num_bytes
            if not version_store.advance(incoming, offer.part, upstream, at):
                raise LinkBroken(f"version {offer.version} is no longer received from {upstream}")
            failpoint("receive", version=offer.version, num_bytes=at)
        elif kind is FrameKind.MESSAGE:
            trailer = receive_frame(link, TRAILERS, SILENCE_S, head)
            if not trailer.digest:
                version_store.abandon(incoming, offer.part, upstream)
                return False
            is_right = version_store.finish(incoming, offer.part, trailer.digest)
            send_frame(link, TransferAck(is_right), SILENCE_S)
            return is_right


def receive_version(link: Link, into: np.ndarray) -> str | None:
    """Receive one version into a buffer, uint8 [num_bytes]: its digest, or None if the other end does not hold it.

    Raises `LinkBroken` or `MessageRefused`.
    """
    offer = receive_frame(link, OFFERS_OR_NONE, SILENCE_S)
    if isinstance(offer, Trailer):
        return None
    if offer.num_bytes != into.nbytes:
        raise LinkBroken(f"version {offer.version} has {offer.num_bytes} bytes, not {into.nbytes}")
    send_frame(link, Accept(0), SILENCE_S)
    _fill(link, into, f"version {offer.version}")
    trailer = receive_frame(link, TRAILERS, SILENCE_S)
    is_right = digest(into) == trailer.digest
    send_frame(link, TransferAck(is_right), SILENCE_S)
    if not is_right:
        raise LinkBroken(f"version {offer.version} arrived with a wrong digest")
    return trailer.digest


def _fill(link: Link, into: np.ndarray, what: str) -> None:
    at = 0
    while at < into.nbytes:
        kind, num_bytes = receive_head(link, SILENCE_S)
        if kind is FrameKind.MESSAGE or at + num_bytes > into.nbytes:
            raise LinkBroken(f"{what} ended after {at} of {into.nbytes} bytes")
        link.receive(into[at : at + num_bytes], SILENCE_S)
        at += num_bytes


def push_seconds(num_nodes: int, num_bytes: float, num_chunks: float, byte_s: float, start_s: float) -> float:
    """T(k): seconds until the last of `num_nodes` nodes has everything."""
    return (num_nodes + num_chunks - 2) * (num_bytes * byte_s / num_chunks + start_s)


def best_num_chunks(num_nodes: int, num_bytes: float, byte_s: float, start_s: float) -> float:
    """k*: the number of chunks with the smallest T(k), at least 1."""
    return max(1.0, math.sqrt(max(num_nodes - 2, 0) * num_bytes * byte_s / start_s))


def chunk_bytes(num_nodes: int, num_bytes: int, byte_s: float, start_s: float) -> int:
    """Bytes of a chunk at k*, within `CHUNK_RANGE`."""
    best = num_bytes / best_num_chunks(num_nodes, num_bytes, byte_s, start_s)
    least, most = CHUNK_RANGE
    return int(min(max(best, least), most))


class ChunkedSender:
    """Sends versions in chunks of k* bytes for the speed of the last transfer, or of `fixed_bytes`."""

    def __init__(self, fixed_bytes: int | None = None) -> None:
        self._fixed_bytes = fixed_bytes
        self._byte_s = _FIRST_BYTE_S

    def send(self, link: Link, source: VersionSource, num_bytes: int, num_nodes: int) -> bool:
        """Send a version, or a part of `num_bytes`, down a chain of `num_nodes`, like `send_version`."""
        piece_bytes = self._fixed_bytes or chunk_bytes(num_nodes, num_bytes, self._byte_s, START_S)
        started = time.monotonic()
        is_sent = send_version(link, source, SILENCE_S, piece_bytes)
        if is_sent:
            self._byte_s = (time.monotonic() - started) / max(num_bytes, 1)
        return is_sent


class VersionSender:
    """Sends versions of a store over links."""

    def __init__(self, version_store: "VersionStore", segment_path: str) -> None:
        self._chunked_sender = ChunkedSender()
        self._version_store = version_store
        # An opening of its own, whose locks exclude the writer's; it is mapped now, since that takes too long in a repair.
        self._slots = VersionSlots(Segment.open(segment_path))

    def send_all(self, link: Link, is_wanted: Callable[[], bool], num_nodes: int = 2) -> None:
        """Send each new version down a chain of `num_nodes`, as long as `is_wanted`. Raises `LinkBroken`.

        Consumes versions of the store; waits for the next; woken by its arrival.
        """
        sent = -1
        while is_wanted():
            source = self._version_store.next_source(self._slots, sent, IDLE_S / 2)
            if source is None:
                send_idle(link, SILENCE_S)
                continue
            with closing(source):
                if self._chunked_sender.send(link, source, source.offer.num_bytes, num_nodes):
                    sent = source.offer.version

    def send_one(self, link: Link, version: int) -> None:
        """Send one complete version if it is still stored, else an empty trailer."""
        source = self._version_store.source_of(self._slots, version)
        if source is None:
            send_frame(link, Trailer(""), SILENCE_S)
            return
        with closing(source):
            send_version(link, source, SILENCE_S)

    def close(self) -> None:
        self._slots.segment.close()
