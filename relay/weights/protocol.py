"""The protocol that carries a version over a link. The sender offers; the receiver names the byte to start from.

    sender                                  receiver
    Offer(version, bytes, layout)        ->
                                         <- Accept(offset to start from, or -1: not wanted)
    data, as it becomes available        ->
    Trailer(digest, "" if abandoned)     ->
                                         <- TransferAck(whether the bytes match the digest)

All are frames (`comm/links/frames.py`). While it has nothing to send, the sender sends idle frames, so silence means that it is
dead. A transfer that broke continues at its offset over the next link.
"""

from typing import Protocol

import msgspec
import numpy as np

from ...comm.errors import LinkBroken
from ...comm.links.base import Link
from ...comm.links.frames import receive_frame, send_data, send_frame, send_idle
from ...comm.messages.weights import Offer
from .byte_ranges import ranges_of

IDLE_S = 1.0
SILENCE_S = 5.0
PIECE_BYTES = 1 << 20
"""Default size of a data frame."""
MAX_PIECE_BYTES = 32 << 20
_MAX_ATTEMPTS = 3


class Accept(msgspec.Struct, frozen=True, tag=True):
    """The receiver wants the bytes from `offset` on; -1 if it wants none."""

    offset: int


class Trailer(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent, and this is their digest; empty if the sender abandoned the version."""

    digest: str


class TransferAck(msgspec.Struct, frozen=True, tag=True):
    """Whether the receiver's bytes match the digest."""

    is_right: bool


OFFERS = msgspec.msgpack.Decoder(Offer)
OFFERS_OR_NONE = msgspec.msgpack.Decoder(Offer | Trailer)
TRAILERS = msgspec.msgpack.Decoder(Trailer)
_ACCEPTS = msgspec.msgpack.Decoder(Accept)
_ACKS = msgspec.msgpack.Decoder(TransferAck)


class VersionSource(Protocol):
    """A version to send, which may still be arriving."""

    offer: Offer

    def bytes_at(self, at: int, start: int, end: int) -> np.ndarray:
        """The bytes from `at` of the part on, which are those of [start, end) of the layout."""
        ...

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        """Bytes that are in place from the start; waits up to `timeout_s` for more than `beyond`."""
        ...

    def digest(self, timeout_s: float) -> str | None:
        """The digest, or None if it was not known within `timeout_s`."""

    def is_valid(self) -> bool:
        """False once the version was abandoned or its bytes were overwritten."""
        ...


def send_version(link: Link, source: VersionSource, deadline_s: float, piece_bytes: int = PIECE_BYTES) -> bool:
    """Offer a version and send what the receiver lacks; False if the version was abandoned on the way.

    Raises `LinkBroken` or `MessageRefused`; `deadline_s` bounds each piece.
    """
    for _ in range(_MAX_ATTEMPTS):
        send_frame(link, source.offer, deadline_s)
        answer = receive_frame(link, _ACCEPTS, deadline_s)
        if answer.offset < 0:
            return True
        if not _send_bytes(link, source, answer.offset, deadline_s, piece_bytes):
            return False
        while (digest := source.digest(IDLE_S)) is None and source.is_valid():
            send_idle(link, deadline_s)
        digest = digest if source.is_valid() else ""
        send_frame(link, Trailer(digest or ""), deadline_s)
        if not digest:
            return False
        if receive_frame(link, _ACKS, deadline_s).is_right:
            return True
    raise LinkBroken(f"version {source.offer.version} arrived with a wrong digest {_MAX_ATTEMPTS} times")


def _send_bytes(link: Link, source: VersionSource, at: int, deadline_s: float, piece_bytes: int) -> bool:
    for offset, start, end in ranges_of(source.offer).chunks(at, piece_bytes):
        while (ready := source.bytes_ready(offset, IDLE_S)) < offset + end - start and source.is_valid():
            if ready <= offset:
                send_idle(link, deadline_s)
        if not source.is_valid():
            send_frame(link, Trailer(""), deadline_s)
            return False
        send_data(link, source.bytes_at(offset, start, end), deadline_s)
    return True
