"""Frames: the one form of what is not a bare array on a link. A frame is a head of two int64 (kind, bytes), and its bytes.

A message is a struct in msgpack, which its decoder describes completely. Data is a piece of an array whose place the messages before it
say. An idle frame is empty: an end that has nothing to send shows with it that it lives. What breaks this form raises `MessageRefused`.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from ..errors import MessageRefused

if TYPE_CHECKING:
    from .base import Link

T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Of a frame. A longer one is split by its sender; one that is announced is refused before memory is taken for it."""
_HEAD_BYTES = 16
_ENCODER = msgspec.msgpack.Encoder()


class FrameKind(IntEnum):
    """The content of a frame."""

    IDLE = 0
    MESSAGE = 1
    DATA = 2


class FrameHead(NamedTuple):
    """The kind of a frame and the number of bytes that follow."""

    kind: FrameKind
    num_bytes: int


def encode_frame(message: object) -> np.ndarray:
    """A message as a frame, uint8 [num_bytes]."""
    body = _ENCODER.encode(message)
    return np.frombuffer(_head(FrameKind.MESSAGE, len(body)).tobytes() + body, np.uint8)


def decode_frame(data: np.ndarray, decoder: msgspec.msgpack.Decoder[T]) -> tuple[T, int]:
    """The message with which `data` begins, and the end of its frame. Raises `MessageRefused`."""
    kind, num_bytes = _checked_head(data[:_HEAD_BYTES])
    end = _HEAD_BYTES + num_bytes
    if kind is not FrameKind.MESSAGE or end > data.nbytes:
        raise MessageRefused(
            f"malformed frame: {kind.name}, {num_bytes} bytes, of which {data.nbytes - _HEAD_BYTES} came"
        )
    return _decoded(data[_HEAD_BYTES:end], decoder), end


def send_frame(link: "Link", message: object, deadline_s: float) -> None:
    """Send a message; `deadline_s` bounds each piece, as everywhere here. Raises `LinkBroken`."""
    frame = encode_frame(message)
    link.send(frame[:_HEAD_BYTES], deadline_s)
    link.send(frame[_HEAD_BYTES:], deadline_s)


def send_data(link: "Link", piece: np.ndarray, deadline_s: float) -> None:
    """Send a piece of data, uint8 [num_bytes]. Raises `LinkBroken`."""
    link.send(_head(FrameKind.DATA, piece.nbytes), deadline_s)
    link.send(piece, deadline_s)


def send_idle(link: "Link", deadline_s: float) -> None:
    """Show the other end that this one is alive. Raises `LinkBroken`."""
    link.send(_head(FrameKind.IDLE, 0), deadline_s)


def receive_head(link: "Link", deadline_s: float) -> FrameHead:
    """The head of the next frame. Raises `LinkBroken` or `MessageRefused`."""
    head = np.empty(_HEAD_BYTES, np.uint8)
    link.receive(head, deadline_s)
    return _checked_head(head)


def receive_frame(
    link: "Link", decoder: msgspec.msgpack.Decoder[T], deadline_s: float, head: FrameHead | None = None
) -> T:
    """The next message, or the one whose `head` came already; idle frames are skipped. Raises `LinkBroken` or `MessageRefused`."""
    kind, num_bytes = head or receive_head(link, deadline_s)
    while kind is FrameKind.IDLE:
        kind, num_bytes = receive_head(link, deadline_s)
    if kind is FrameKind.DATA:
        raise MessageRefused("malformed frame: data in place of a message")
    body = np.empty(num_bytes, np.uint8)
    link.receive(body, deadline_s)
    return _decoded(body, decoder)


def _head(kind: FrameKind, num_bytes: int) -> np.ndarray:
    return np.array([kind, num_bytes], np.int64).view(np.uint8)


def _checked_head(head: np.ndarray) -> FrameHead:
    if head.nbytes < _HEAD_BYTES:
        raise MessageRefused(f"malformed frame: a head of {head.nbytes} bytes")
    kind, num_bytes = head.view(np.int64).tolist()
    if kind not in tuple(FrameKind) or not 0 <= num_bytes <= (MAX_BYTES if kind else 0):
        raise MessageRefused(f"malformed frame: kind {kind}, {num_bytes} bytes")
    return FrameHead(FrameKind(kind), num_bytes)


def _decoded(body: np.ndarray, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(body.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageRefused(f"malformed frame: {error}") from error
