"""Frames: the format of messages and data on every connection. A frame is a header of two int64 (kind, number of bytes) and a body.

The body of a message is a msgpack struct, validated completely by its decoder. The body of a data frame is a piece of an array; the
messages before it say where the piece belongs. An idle frame has no body: an end with nothing to send shows with it that it is alive.
Malformed input raises `MessageRefused`. `links/frames.py` sends frames over a link.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import msgspec

from .errors import MessageRefused

T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Most bytes of a frame. The sender splits longer data; the receiver refuses a longer frame before it allocates memory."""
HEAD_BYTES = 16
_HEAD = struct.Struct("=qq")
_ENCODER = msgspec.msgpack.Encoder()


class FrameKind(IntEnum):
    """The kind of a frame's body."""

    IDLE = 0
    MESSAGE = 1
    DATA = 2


class FrameHead(NamedTuple):
    """The kind of a frame and the number of bytes that follow."""

    kind: FrameKind
    num_bytes: int


_KINDS = {int(kind): kind for kind in FrameKind}


def encode_head(kind: FrameKind, num_bytes: int) -> bytes:
    """The header of a frame."""
    return _HEAD.pack(kind, num_bytes)


def encode_message(message: object) -> bytes:
    """A message as a whole frame."""
    body = _ENCODER.encode(message)
    return _HEAD.pack(FrameKind.MESSAGE, len(body)) + body


def decode_head(data: bytes | bytearray | memoryview, most: int = MAX_BYTES) -> FrameHead:
    """The header at the start of `data`; a body of more than `most` bytes is refused. Raises `MessageRefused`."""
    if len(data) < HEAD_BYTES:
        raise MessageRefused(f"malformed frame: a header of {len(data)} bytes")
    kind, num_bytes = _HEAD.unpack_from(data)
    known = _KINDS.get(kind)
    if known is None or not 0 <= num_bytes <= (most if kind else 0):
        raise MessageRefused(f"malformed frame: kind {kind}, {num_bytes} bytes")
    return FrameHead(known, num_bytes)


def decode_body(body: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The message in the bytes of a frame. Raises `MessageRefused`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageRefused(f"malformed frame: {error}") from error


class FrameReader(Generic[T]):
    """Decodes the messages in a stream of bytes; a message of more than `most` bytes is refused."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], most: int) -> None:
        self._decoder = decoder
        self._most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Add bytes, and yield the messages that are now complete. Raises `MessageRefused`."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD_BYTES:
                kind, num_bytes = decode_head(buffer[start : start + HEAD_BYTES], self._most)
                end = start + HEAD_BYTES + num_bytes
                if kind is FrameKind.DATA:
                    raise MessageRefused("malformed frame: data instead of a message")
                if end > len(buffer):
                    return
                body = bytes(buffer[start + HEAD_BYTES : end])
                start = end
                if kind is FrameKind.MESSAGE:
                    yield decode_body(body, self._decoder)
        finally:
            del buffer[:start]
