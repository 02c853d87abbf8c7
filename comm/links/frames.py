"""Frames (`comm/frames.py`) over a link: messages, pieces of arrays, and signs of life."""

from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from ..errors import MessageRefused
from ..frames import (
    HEAD_BYTES,
    MAX_BYTES,
    FrameHead,
    FrameKind,
    decode_body,
    decode_head,
    encode_head,
    encode_message,
)

if TYPE_CHECKING:
    from .base import Link

__all__ = ["MAX_BYTES", "FrameHead", "FrameKind"]
T = TypeVar("T")


def encode_frame(message: object) -> np.ndarray:
    """A message as a frame, uint8 [num_bytes]."""
    return np.frombuffer(encode_message(message), np.uint8)


def decode_frame(data: np.ndarray, decoder: msgspec.msgpack.Decoder[T]) -> tuple[T, int]:
    """The message with which `data` begins, and the end of its frame. Raises `MessageRefused`."""
    kind, num_bytes = decode_head(data[:HEAD_BYTES].data)
    end = HEAD_BYTES + num_bytes
    if kind is not FrameKind.MESSAGE or end > data.nbytes:
        raise MessageRefused(
            f"malformed frame: {kind.name}, {num_bytes} bytes, of which {data.nbytes - HEAD_BYTES} came"
        )
    return decode_body(data[HEAD_BYTES:end].data, decoder), end


def send_frame(link: "Link", message: object, deadline_s: float) -> None:
    """Send a message; `deadline_s` bounds each piece, as everywhere here. Raises `LinkBroken`."""
    frame = encode_frame(message)
    if link.backend == "tcp":  # one send wakes the other end once; a process group hands over each send by itself
        link.send(frame, deadline_s)
        return
    link.send(frame[:HEAD_BYTES], deadline_s)
    link.send(frame[HEAD_BYTES:], deadline_s)


def send_data(link: "Link", piece: np.ndarray, deadline_s: float) -> None:
    """Send a piece of data, uint8 [num_bytes]. Raises `LinkBroken`."""
    link.send(_head(FrameKind.DATA, piece.nbytes), deadline_s)
    link.send(piece, deadline_s)


def send_idle(link: "Link", deadline_s: float) -> None:
    """Show the other end that this one is alive. Raises `LinkBroken`."""
    link.send(_head(FrameKind.IDLE, 0), deadline_s)


def receive_head(link: "Link", deadline_s: float) -> FrameHead:
    """The head of the next frame. Raises `LinkBroken` or `MessageRefused`."""
    head = np.empty(HEAD_BYTES, np.uint8)
    link.receive(head, deadline_s)
    return decode_head(head.data)


def receive_frame(
    link: "Link", decoder: msgspec.msgpack.Decoder[T], deadline_s: float, head: FrameHead | None = None
) -> T:
    """The next message, or the one whose `head` came already; idle frames are skipped. Raises `LinkBroken` or `MessageRefused`."""
    kind, num_bytes = head or receive_head(link, deadline_s)
    while kind is FrameKind.IDLE:
        kind, num_bytes = receive_head(link, deadline_s)
    if kind is FrameKind.DATA:
        raise MessageRefused("malformed frame: data instead of a message")
    body = np.empty(num_bytes, np.uint8)
    link.receive(body, deadline_s)
    return decode_body(body.data, decoder)


def _head(kind: FrameKind, num_bytes: int) -> np.ndarray:
    return np.frombuffer(encode_head(kind, num_bytes), np.uint8)
