"""The protocol that carries versions over a link. The sender offers; the receiver names the byte to start from.

    sender                                  receiver
    Offer(version, bytes, layout)        ->
                                         <- Accept(offset to start from, or -1: not wanted)
    data, as it becomes available        ->
    Trailer(digest, "" if abandoned)     ->
                                         <- TransferAck(whether the bytes match the digest)

All are frames (`comm/links/frames.py`). While an end works without a frame, it sends idle ones, so silence means that it is dead.
A transfer that broke continues at its offset over the next link. A receiver that can read the sender's memory accepts from the
last byte on, and copies.

The size of a chunk is by Laminar's model, in seconds and bytes. With p nodes (the sender included), M bytes in k chunks, and a
chunk costing M / k * T_byte + T_start per hop, the last node has the last chunk after T(k) = (p + k - 2) * (M * T_byte / k + T_start).
With few chunks the nodes behind wait long; many chunks cost start-ups.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ...comm.errors import LinkBroken
from ...comm.links.base import Link
from ...comm.links.frames import FrameKind, receive_frame, receive_head, send_data, send_frame, send_idle
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Segment
from ...comm.trace import failpoint
from .byte_ranges import GRID_BYTES, digest, ranges_of

if TYPE_CHECKING:
    from .version_store import IncomingVersion, VersionSource, VersionStore

IDLE_S = 1.0
SILENCE_S = 5.0
MAX_PIECE_BYTES = 32 << 20
START_S = 400e-6
"""Seconds that a data frame costs besides its bytes: headers, wake-ups and Python at both ends."""
_FIRST_BYTE_S = 1 / 2e9  # before the link's speed is known
CHUNK_RANGE = (64 << 10, MAX_PIECE_BYTES)
"""Bytes of the smallest and the largest chunk that links carry well."""
_MAX_ATTEMPTS = 3


class _Accept(msgspec.Struct, frozen=True, tag=True):
    """The receiver wants the bytes from `offset` on; -1 if it wants none."""

    offset: int


class Trailer(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent, and this is their digest; empty if the sender abandoned the version."""

    digest: str


class _TransferAck(msgspec.Struct, frozen=True, tag=True):
    """Whether the receiver's bytes match the digest."""

    is_right: bool


_OFFERS = msgspec.msgpack.Decoder(Offer)
OFFERS_OR_NONE = msgspec.msgpack.Decoder(Offer | Trailer)
TRAILERS = msgspec.msgpack.Decoder(Trailer)
_ACCEPTS = msgspec.msgpack.Decoder(_Accept)
_ACKS = msgspec.msgpack.Decoder(_TransferAck)


NextSource = Callable[[int, float], "VersionSource | None"]
"""(above, timeout_s) -> the newest version above `above`, which the caller closes; None if none comes in time."""


def send_versions(
    link: Link,
    next_source: NextSource,
    is_wanted: Callable[[], bool],
    num_nodes: int = 2,
    piece_bytes: int | None = None,
) -> None:
    """Send each new version down a chain of `num_nodes`, as long as `is_wanted`. Raises `LinkBroken` or `MessageRefused`.

    Consumes versions; waits for the next; woken by its arrival. Pieces have `piece_bytes`, else k* by the link's speed.
    """
    sent = -1
    byte_s = _FIRST_BYTE_S
    while is_wanted():
        source = next_source(sent, IDLE_S / 2)
        if source is None:
            send_idle(link, SILENCE_S)
            continue
        num_bytes = max(source.buffer.nbytes, 1)
        started = time.monotonic()
        if send_version(link, source, piece_bytes or chunk_bytes(num_nodes, num_bytes, byte_s, START_S)):
            byte_s = (time.monotonic() - started) / num_bytes
            sent = source.offer.version


def send_version(link: Link, source: "VersionSource | None", piece_bytes: int = 1 << 20) -> bool:
    """Offer a version, send what the receiver lacks, and close it; False if `source` is None, or if it was abandoned on the way.

    Raises `LinkBroken` or `MessageRefused`.
    """
    if source is None:
        send_frame(link, Trailer(""), SILENCE_S)
        return False
    with closing(source):
        for _ in range(_MAX_ATTEMPTS):
            send_frame(link, source.offer, SILENCE_S)
            answer = receive_frame(link, _ACCEPTS, SILENCE_S)
            if answer.offset < 0:
                return True
            if not _send_bytes(link, source, answer.offset, piece_bytes):
                return False
            while (digest := source.digest(IDLE_S)) is None and source.is_valid():
                send_idle(link, SILENCE_S)
            digest = digest if source.is_valid() else ""
            send_frame(link, Trailer(digest or ""), SILENCE_S)
            if not digest:
                return False
            if receive_frame(link, _ACKS, SILENCE_S).is_right:
                return True
    raise LinkBroken(f"version {source.offer.version} arrived with a wrong digest {_MAX_ATTEMPTS} times")


def _send_bytes(link: Link, source: "VersionSource", at: int, piece_bytes: int) -> bool:
    for offset, start, end in ranges_of(source.offer).chunks(at, piece_bytes):
        after = offset + end - start
        while (ready := source.bytes_ready(offset, IDLE_S)) < after and source.is_valid():
            if ready <= offset:
                send_idle(link, SILENCE_S)
        if not source.is_valid():
            send_frame(link, Trailer(""), SILENCE_S)
            return False
        send_data(link, source.buffer[offset:after], SILENCE_S)
    return True


@dataclass
class VersionReceiver:
    """Stores the versions that `upstream` offers over a link."""

    link: Link
    version_store: "VersionStore"
    upstream: str
    memory: Segment | None = None
    """That of the sender, if the bytes are copied from there."""
    silence_s: float = SILENCE_S
    """Seconds without a frame after which the link counts as broken."""

    def run(self, is_closing: Callable[[], bool], on_complete: Callable[["IncomingVersion"], None]) -> None:
        """Receive until the link breaks or this process closes.

        Consumes offers and their bytes; waits for the link alone; woken by frames, idle ones included.
        """
        while not is_closing():
            head = receive_head(self.link, self.silence_s)
            if head.kind is FrameKind.IDLE:
                continue
            offer = receive_frame(self.link, _OFFERS, SILENCE_S, head)
            opened = self.version_store.begin_receive(offer, self.upstream)
            if opened is None:
                send_frame(self.link, _Accept(-1), SILENCE_S)
                continue
            incoming, at = opened
            if self.memory is None:
                send_frame(self.link, _Accept(at), SILENCE_S)
            else:
                send_frame(self.link, _Accept(end := ranges_of(offer).num_bytes), SILENCE_S)
                self._copy(incoming, offer, at, self.memory.slot(offer.slot))
                at = end
            if self._receive(incoming, offer, at):
                on_complete(incoming)

    def _copy(self, incoming: "IncomingVersion", offer: Offer, at: int, source: np.ndarray) -> None:
        """Copy a part from `at` on, unless it is not wanted any more; its digest tells whether it is whole."""
        spoke = time.monotonic()
        for offset, start, end in ranges_of(offer).chunks(at, GRID_BYTES):
            after = offset + end - start
            copy = partial(np.copyto, incoming.buffer[start:end], source[offset:after])
            if not self.version_store.fill(incoming, offer.part, self.upstream, after, copy):
                return
            if time.monotonic() - spoke > IDLE_S:
                send_idle(self.link, SILENCE_S)
                spoke = time.monotonic()
        failpoint("push", version=offer.version)

    def _receive(self, incoming: "IncomingVersion", offer: Offer, at: int) -> bool:
        """Receive a part from `at` on; True once it is right, False if it was abandoned or must come again."""
        ranges = ranges_of(offer)
        while True:
            kind, num_bytes = head = receive_head(self.link, self.silence_s)
            if kind is FrameKind.DATA:
                start, end = ranges.locate(at)
                if start + num_bytes > end:
                    raise LinkBroken(f"{self.upstream} sends more of version {offer.version} than it offered")
                at += num_bytes
                receive = partial(self.link.receive, incoming.buffer[start : start + num_bytes], SILENCE_S)
                if not self.version_store.fill(incoming, offer.part, self.upstream, at, receive):
                    raise LinkBroken(f"version {offer.version} is no longer received from {self.upstream}")
                failpoint("receive", version=offer.version, num_bytes=at)
            elif kind is FrameKind.MESSAGE:
                trailer = receive_frame(self.link, TRAILERS, SILENCE_S, head)
                if not trailer.digest:
                    self.version_store.abandon(incoming, offer.part, self.upstream)
                    return False
                is_right = self.version_store.finish(incoming, offer.part, trailer.digest)
                send_frame(self.link, _TransferAck(is_right), SILENCE_S)
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
    send_frame(link, _Accept(0), SILENCE_S)
    _fill(link, into, f"version {offer.version}")
    trailer = receive_frame(link, TRAILERS, SILENCE_S)
    is_right = digest(into) == trailer.digest
    send_frame(link, _TransferAck(is_right), SILENCE_S)
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
