"""The messages between a storage unit and its clients, as frames on a link; the bytes of columns follow them bare."""

from typing import Annotated

import msgspec
from msgspec import Meta

LINK_NAME = "rows"


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One column of a row, `start` bytes after the offset of its block; `digest` is the xxh3 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    digest: int


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of one row, stored in order from `offset` on; a unit never gives two blocks the same `serial`."""

    serial: int
    offset: int
    columns: tuple[Column, ...]

    @property
    def first_byte(self) -> int:
        """The offset of its first column."""
        return self.offset + self.columns[0].start if self.columns else self.offset

    @property
    def num_bytes(self) -> int:
        """Bytes from its first column to the end of its last."""
        return self.columns[-1].start + self.columns[-1].num_bytes - self.columns[0].start if self.columns else 0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The unit's first message: a client on this host may read and write the memory at `path`."""

    host: str
    path: str


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Reserve space for blocks of these sizes until the client's `Commit`; frees what it reserved before and never committed."""

    sizes: list[Annotated[int, Meta(ge=0)]]


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """An offset and a serial for each size."""

    offsets: list[int]
    serials: list[int]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Make reserved blocks columns of their rows: the client has written their bytes, or with `with_bytes` they follow."""

    keys: list[str]
    blocks: list[Block]
    with_bytes: bool


class Locate(msgspec.Struct, frozen=True, tag=True):
    """Ask for the named columns (None for all) of these rows; with `with_bytes` their bytes follow the answer."""

    keys: list[str]
    columns: list[str] | None
    with_bytes: bool


class Located(msgspec.Struct, frozen=True, tag=True):
    """For each row its blocks, with only the columns asked for."""

    rows: list[list[Block]]


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Drop rows."""

    keys: list[str]


class ListRows(msgspec.Struct, frozen=True, tag=True):
    """Ask for all rows."""


class Listing(msgspec.Struct, frozen=True, tag=True):
    """The keys of all rows."""

    keys: list[str]


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Success; `count` rows were affected."""

    count: int


class NotFound(msgspec.Struct, frozen=True, tag=True):
    """The unit does not hold this row or column."""

    what: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request failed; `is_full` where the unit is out of memory."""

    why: str
    is_full: bool


Request = Reserve | Commit | Locate | Drop | ListRows
Answer = Reserved | Located | Listing | Ack | NotFound | Refused

REQUESTS = msgspec.msgpack.Decoder(Request)
ANSWERS = msgspec.msgpack.Decoder(Answer)
HELLOS = msgspec.msgpack.Decoder(Hello)
