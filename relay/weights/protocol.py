"""The protocol that carries a version over a link. The sender offers; the receiver names the byte to start from.

    sender                                  receiver
    Offer(version, bytes, layout)        ->
                                         <- Accept(offset to start from, or -1: not wanted)
    data, as it becomes available        ->
    Trailer(digest, "" if abandoned)     ->
                                         <- TransferAck(whether the bytes match the digest)

A frame is a header of two int64 (kind, bytes) and its bytes. While it has nothing to send, the sender sends idle frames, so
silence means that it is dead. A transfer that broke continues at its offset over the next link.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import numpy as np

from ...comm.errors import LinkBroken
from ...comm.links.base import Link
from ...comm.messages.weights import Offer
from .byte_ranges import ranges_of

if TYPE_CHECKING:
    from .delta import Difference

IDLE_S = 1.0
SILENCE_S = 5.0
PIECE_BYTES = 1 << 20
"""Default size of a data frame."""
MAX_PIECE_BYTES = 32 << 20
_MAX_STRUCT_BYTES = 4 << 20  # an offer lists the ranges of a part
_MAX_ATTEMPTS = 3


class FrameKind(IntEnum):
    """The content of a frame."""

    IDLE = 0
    STRUCT = 1
    DATA = 2


class Accept(msgspec.Struct, frozen=True, tag=True):
    """The receiver wants the bytes from `offset` on, or the delta that was offered; -1 if it wants none."""

    offset: int
    takes_delta: bool = False


class Trailer(msgspec.Struct, frozen=True, tag=True):
    """All bytes were sent, and this is their digest; empty if the sender abandoned the version."""

    digest: str


class TransferAck(msgspec.Struct, frozen=True, tag=True):
    """Whether the receiver's bytes match the digest."""

    is_right: bool


Frame = Offer | Accept | Trailer | TransferAck
F = TypeVar("F", bound=Frame)
_decoder = msgspec.json.Decoder(Frame)


class VersionSource(Protocol):
    """A version to send, which may still be arriving."""

    offer: Offer
    difference: "Difference | None"
    """The version as a difference to an older one, for a receiver that holds the older one."""

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

    Raises `LinkBroken`; `deadline_s` bounds each piece.
    """
    for attempt in range(_MAX_ATTEMPTS):
        difference = source.difference if attempt == 0 else None
        delta = None if difference is None else difference.delta
        send_frame(link, msgspec.structs.replace(source.offer, delta=delta), deadline_s)
        answer = receive_frame(link, Accept, deadline_s)
        if answer.offset < 0:
            return True
        if difference is not None and answer.takes_delta:
            changes = difference.changes
            for start in range(0, changes.nbytes, PIECE_BYTES):
                _send_data(link, changes[start : start + PIECE_BYTES], deadline_s)
        elif not _send_bytes(link, source, answer.offset, deadline_s, piece_bytes):
            return False
        while (digest := source.digest(IDLE_S)) is None and source.is_valid():
            send_idle(link, deadline_s)
        digest = digest if source.is_valid() else ""
        send_frame(link, Trailer(digest or ""), deadline_s)
        if not digest:
            return False
        if receive_frame(link, TransferAck, deadline_s).is_right:
            return True
    raise LinkBroken(f"version {source.offer.version} arrived wrong {_MAX_ATTEMPTS} times")


def _send_bytes(link: Link, source: VersionSource, at: int, deadline_s: float, piece_bytes: int) -> bool:
    for offset, start, end in ranges_of(source.offer).chunks(at, piece_bytes):
        while (ready := source.bytes_ready(offset, IDLE_S)) < offset + end - start and source.is_valid():
            if ready <= offset:
                send_idle(link, deadline_s)
        if not source.is_valid():
            send_frame(link, Trailer(""), deadline_s)
            return False
        _send_data(link, source.bytes_at(offset, start, end), deadline_s)
    return True


def _send_data(link: Link, piece: np.ndarray, deadline_s: float) -> None:
    _send_header(link, FrameKind.DATA, piece.nbytes, deadline_s)
    link.send(piece, deadline_s)


def send_idle(link: Link, deadline_s: float) -> None:
    """Show the other end that this one is alive."""
    _send_header(link, FrameKind.IDLE, 0, deadline_s)


def send_frame(link: Link, frame: Frame, deadline_s: float) -> None:
    """Send one struct."""
    body = np.frombuffer(msgspec.json.encode(frame), dtype=np.uint8)
    _send_header(link, FrameKind.STRUCT, body.nbytes, deadline_s)
    link.send(body, deadline_s)


def receive_header(link: Link, deadline_s: float) -> tuple[FrameKind, int]:
    """The kind of the next frame and the number of its bytes. Raises `LinkBroken`."""
    header = np.empty(16, np.uint8)
    link.receive(header, deadline_s)
    kind, num_bytes = header.view(np.int64).tolist()
    most = MAX_PIECE_BYTES if kind == FrameKind.DATA else _MAX_STRUCT_BYTES
    if kind not in tuple(FrameKind) or not 0 <= num_bytes <= most:
        raise LinkBroken(f"malformed frame header: kind {kind}, {num_bytes} bytes")
    return FrameKind(kind), num_bytes


def receive_frame(link: Link, expected: type[F], deadline_s: float) -> F:
    """The next struct, idle frames skipped. Raises `LinkBroken` for anything else."""
    kind, num_bytes = receive_header(link, deadline_s)
    while kind is FrameKind.IDLE:
        kind, num_bytes = receive_header(link, deadline_s)
    if kind is not FrameKind.STRUCT:
        raise LinkBroken(f"data arrived in place of {expected.__name__}")
    return receive_struct(link, num_bytes, expected, deadline_s)


def receive_struct(link: Link, num_bytes: int, expected: type[F] | tuple[type[F], ...], deadline_s: float) -> F:
    """The struct of `num_bytes` bytes that a header announced. Raises `LinkBroken` unless it is one of `expected`."""
    body = np.empty(num_bytes, np.uint8)
    link.receive(body, deadline_s)
    try:
        frame = _decoder.decode(body.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LinkBroken(f"malformed frame: {error}") from error
    if not isinstance(frame, expected):
        raise LinkBroken(f"unexpected frame: {type(frame).__name__}")
    return frame


def _send_header(link: Link, kind: FrameKind, num_bytes: int, deadline_s: float) -> None:
    link.send(np.array([kind, num_bytes], dtype=np.int64).view(np.uint8), deadline_s)
