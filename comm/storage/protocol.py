"""What a storage unit and its clients say to each other, as msgpack frames on a link."""

import msgspec


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One column of a row, `start` bytes behind the place of its block; `digest` is the xxh3 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    digest: int


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of one row that lie behind each other at `offset`; no two blocks of a unit ever have the same `serial`."""

    serial: int
    offset: int
    columns: tuple[Column, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its columns."""
        return sum(column.num_bytes for column in self.columns)


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Client to unit, first of all: the fleet's member that it works for; the name is empty for a client outside a fleet."""

    member: str
    incarnation: int


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Client to unit, last of all: the connection ends in order. The unit does not answer."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Unit to client: whoever finds `magic` at the head of the file at `path` may read and write there."""

    path: str
    magic: bytes


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Places for blocks of these sizes, to be written by the client; until it commits them they are its own."""

    sizes: list[int]


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """One place and serial for each size."""

    offsets: list[int]
    serials: list[int]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """The bytes of these blocks are there: from now on they are columns of their rows."""

    keys: list[str]
    blocks: list[Block]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Blocks whose bytes follow the frame; their places and serials are the unit's to choose."""

    keys: list[str]
    blocks: list[Block]


class Locate(msgspec.Struct, frozen=True, tag=True):
    """Where are the columns named (all if None) of these rows? `with_bytes` asks for the bytes to follow the answer."""

    keys: list[str]
    columns: list[str] | None
    with_bytes: bool


class Located(msgspec.Struct, frozen=True, tag=True):
    """For each row the blocks asked for, each with the columns asked for only."""

    rows: list[list[Block]]


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget rows."""

    keys: list[str]


class ListRows(msgspec.Struct, frozen=True, tag=True):
    """Which rows are there?"""


class Listing(msgspec.Struct, frozen=True, tag=True):
    """Row keys, each with the index in `column_sets` of the names of its columns."""

    rows: dict[str, int]
    column_sets: list[tuple[str, ...]]

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Row keys, each with the names of its columns."""
        return {key: self.column_sets[kind] for key, kind in self.rows.items()}


class Count(msgspec.Struct, frozen=True, tag=True):
    """How many rows are there?"""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """It is done, for so many."""

    count: int


class NotFound(msgspec.Struct, frozen=True, tag=True):
    """The unit does not hold this."""

    what: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot be done; `is_full` where the unit has no room."""

    why: str
    is_full: bool


Request = Reserve | Commit | Put | Locate | Drop | ListRows | Count | Goodbye
Answer = Reserved | Located | Listing | Ack | NotFound | Refused

REQUESTS = msgspec.msgpack.Decoder(Request)
ANSWERS = msgspec.msgpack.Decoder(Answer)
ATTACHMENTS = msgspec.msgpack.Decoder(Attach)
HELLOS = msgspec.msgpack.Decoder(Hello)
