"""Frames: the one form of messages and data on a connection. A frame is a head of two int64 (kind, bytes), and its bytes.

A message is a struct in msgpack, which its decoder describes completely. Data is a piece of an array whose place the messages
before it say. An idle frame is empty: an end that has nothing to send shows with it that it lives. What breaks this form raises
`MessageRefused`. `links/frames.py` sends frames over a link.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import msgspec

from .errors import MessageRefused

T = TypeVar("T")

MAX_BYTES = 1 << 30
"""Of a frame. A longer one is split by its sender; one that is announced is refused before memory is taken for it."""
HEAD_BYTES = 16
_HEAD = struct.Struct("=qq")
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


_KINDS = tuple(FrameKind)


def encode_head(kind: FrameKind, num_bytes: int) -> bytes:
    """The head of a frame."""
    return _HEAD.pack(kind, num_bytes)


def encode_message(message: object) -> bytes:
    """A message as a whole frame."""
    body = _ENCODER.encode(message)
    return _HEAD.pack(FrameKind.MESSAGE, len(body)) + body


def decode_head(data: bytes | bytearray | memoryview, most: int = MAX_BYTES) -> FrameHead:
    """The head with which `data` begins; `most` bounds what may follow. Raises `MessageRefused`."""
    if len(data) < HEAD_BYTES:
        raise MessageRefused(f"malformed frame: a head of {len(data)} bytes")
    kind, num_bytes = _HEAD.unpack_from(data)
    if kind not in _KINDS or not 0 <= num_bytes <= (most if kind else 0):
        raise MessageRefused(f"malformed frame: kind {kind}, {num_bytes} bytes")
    return FrameHead(FrameKind(kind), num_bytes)


def decode_body(body: bytes | bytearray | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The message in the bytes of a frame. Raises `MessageRefused`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageRefused(f"malformed frame: {error}") from error


class FrameReader(Generic[T]):
    """Cuts a stream of bytes into messages of one kind; `most` bounds the bytes of one."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], most: int) -> None:
        self._decoder = decoder
        self._most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that are whole now. Raises `MessageRefused`."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD_BYTES:
                kind, num_bytes = decode_head(buffer[start : start + HEAD_BYTES], self._most)
                end = start + HEAD_BYTES + num_bytes
                if kind is FrameKind.DATA:
                    raise MessageRefused("malformed frame: data in place of a message")
                if end > len(buffer):
                    return
                body = bytes(buffer[start + HEAD_BYTES : end])
                start = end
                if kind is FrameKind.MESSAGE:
                    yield decode_body(body, self._decoder)
        finally:
            del buffer[:start]
