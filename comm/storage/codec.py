"""Columns as bytes and back, and frames on the link between a storage unit and its clients."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import xxhash

from .protocol import Column

if TYPE_CHECKING:
    from ..links.base import Link

T = TypeVar("T")

LINK_NAME = "rows"
_LENGTH = struct.Struct("<Q")
_FRAME_LIMIT = 1 << 30
_ENCODER = msgspec.msgpack.Encoder()


def send_frame(link: "Link", message: msgspec.Struct, deadline_s: float) -> None:
    """Send a frame."""
    body = _ENCODER.encode(message)
    link.send(np.frombuffer(_LENGTH.pack(len(body)) + body, np.uint8), deadline_s)


def receive_frame(link: "Link", decoder: msgspec.msgpack.Decoder[T], deadline_s: float) -> T:
    """The next frame. Raises `LinkBroken`, or `msgspec.DecodeError` for what is no frame of this kind."""
    head = np.empty(_LENGTH.size, np.uint8)
    link.receive(head, deadline_s)
    (num_bytes,) = _LENGTH.unpack(head.data)
    if num_bytes > _FRAME_LIMIT:
        raise msgspec.DecodeError(f"a frame of {num_bytes} bytes")
    body = np.empty(num_bytes, np.uint8)
    link.receive(body, deadline_s)
    return decoder.decode(body.data)


def refuse_objects(name: str, column: np.ndarray) -> None:
    """Raise `ValueError` for a column whose bytes alone do not say what it is."""
    if column.dtype.hasobject or column.dtype.fields is not None:
        raise ValueError(f"column {name} of {column.dtype}: only plain numbers, strings and raw bytes can be stored")


def encode_columns(columns: Mapping[str, np.ndarray]) -> tuple[tuple[Column, ...], list[np.ndarray]]:
    """Columns in the order in which they are stored, and their bytes, uint8, without a copy where they are contiguous.

    Wider types come first, so that every column is aligned without padding. Raises `ValueError` for objects.
    """
    described: list[Column] = []
    raws: list[np.ndarray] = []
    start = 0
    for name, column in sorted(columns.items(), key=lambda item: -item[1].dtype.alignment):
        refuse_objects(name, column)
        data = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        digest = xxhash.xxh3_64_intdigest(data.data)
        described.append(Column(name, column.dtype.str, column.shape, start, data.nbytes, digest))
        raws.append(data)
        start += data.nbytes
    return tuple(described), raws


def decode_columns(columns: Sequence[Column], data: np.ndarray) -> dict[str, np.ndarray]:
    """Views of columns that lie in `data` behind each other."""
    first = columns[0].start
    return {
        c.name: data[c.start - first : c.start - first + c.num_bytes].view(c.dtype).reshape(c.shape) for c in columns
    }


def wrong_columns(columns: Sequence[Column], data: np.ndarray) -> list[str]:
    """Names of those columns, lying in `data` behind each other, whose bytes are not their writer's."""
    first = columns[0].start if columns else 0
    return [
        c.name
        for c in columns
        if xxhash.xxh3_64_intdigest(data[c.start - first : c.start - first + c.num_bytes].data) != c.digest
    ]


def contiguous_columns(columns: Iterable[Column]) -> list[list[Column]]:
    """Columns of a block as runs that lie without a gap."""
    found: list[list[Column]] = []
    end = -1
    for column in columns:
        if column.start != end:
            found.append([])
        found[-1].append(column)
        end = column.start + column.num_bytes
    return found
