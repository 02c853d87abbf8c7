"""Rows in bulk: each relay hosts a storage unit, whoever needs a row's columns fetches them from there.

A row is what lies under a key: named columns of any plain type and length, which come one by one or together. Whoever adds
columns later leaves the others as they are. On the unit's host the bytes go straight into its memory and out of it again,
from elsewhere over a connection; either way they are checked against their writer's digest when they are read.
"""

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import numpy as np

from ..errors import LinkBroken, PeerGone, StorageFull, WrongDigest
from ..links.base import authenticate
from ..links.tcp import TcpLink
from ..waits import waiting
from .arena import ArenaFile
from .codec import (
    LINK_NAME,
    contiguous_columns,
    decode_columns,
    encode_columns,
    receive_frame,
    send_frame,
    wrong_columns,
)
from .protocol import (
    ANSWERS,
    HELLOS,
    Ack,
    Answer,
    Attach,
    Block,
    Column,
    Commit,
    Count,
    Drop,
    Goodbye,
    Listing,
    ListRows,
    Locate,
    Located,
    NotFound,
    Put,
    Refused,
    Request,
    Reserve,
    Reserved,
)

T = TypeVar("T")

_ALIGN = 64
_GOODBYE_S = 1.0
Columns = Mapping[str, np.ndarray]


class RowStorage(Protocol):
    """A storage unit as its clients see it."""

    def put(self, key: str, columns: Columns) -> int:
        """Add columns to a row, which begins with its first; returns their bytes once the unit has them.

        A column that the row has already is replaced as a whole; the others stay as they are. Raises `StorageFull`, and
        `ValueError` for columns of objects.
        """
        ...

    def put_many(self, rows: Mapping[str, Columns]) -> int:
        """`put` for several rows at once; others see all of it or nothing."""
        ...

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, all or those named.

        Raises `KeyError` if the unit does not hold one of them, `WrongDigest` if its bytes are not what was put.
        """
        ...

    def get_many(self, keys: Iterable[str], columns: Iterable[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
        """`get` for several rows at once. They share one piece of memory, which lives as long as any column of them."""
        ...

    def drop(self, keys: Iterable[str]) -> int:
        """Forget rows; returns how many of them there were. Dropping again is allowed and drops nothing."""
        ...

    def listing(self) -> dict[str, tuple[str, ...]]:
        """Keys of the rows held, with the names of their columns."""
        ...

    def count(self) -> int:
        """Rows held, counted from what lies in the unit."""
        ...

    def close(self) -> None:
        """End the connection; the rows stay. Closing twice is allowed."""
        ...


class StorageClient:
    """One unit's client. Any thread may use it, one at a time. Raises `PeerGone` when the unit is gone.

    `through_memory=False` sends the bytes over the connection even on the unit's own host. `member` and `incarnation` name the
    process: the unit reports it as lost if the connection ends without `close`.
    """

    def __init__(
        self,
        address: str,
        secret: bytes = b"",
        deadline_s: float = 30.0,
        through_memory: bool = True,
        member: str = "",
        incarnation: int = 0,
    ) -> None:
        self.address = address
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._arena: ArenaFile | None = None
        host, _, port = address.rpartition(":")
        try:
            with waiting(f"unit {address}", "a connection", deadline_s):
                self._link = TcpLink(socket.create_connection((host, int(port)), deadline_s))
                authenticate(self._link, LINK_NAME, 1, secret, deadline_s)
                send_frame(self._link, Attach(member, incarnation), deadline_s)
                welcome = receive_frame(self._link, HELLOS, deadline_s)
        except (OSError, LinkBroken) as error:
            raise PeerGone(f"unit {address} is gone: {error}") from error
        if through_memory:
            try:
                self._arena = ArenaFile.begin_receive(welcome.path, welcome.magic)
            except PeerGone:  # the unit is on another host, or behind a wall on this one
                self._arena = None
        self._close = weakref.finalize(self, _close, self._link, self._arena)

    def put(self, key: str, columns: Columns) -> int:
        """Add columns to a row; returns their bytes once the unit has them."""
        return self.put_many({key: columns})

    def put_many(self, rows: Mapping[str, Columns]) -> int:
        """Add columns to several rows at once."""
        encoded = [encode_columns(columns) for columns in rows.values()]
        sizes = [sum(raw.nbytes for raw in raws) for _, raws in encoded]
        with self._lock:
            if self._arena is None:
                blocks = [Block(0, 0, columns) for columns, _ in encoded]
                self._ask(Put(list(rows), blocks), Ack, [raw for _, raws in encoded for raw in raws])
            else:
                given = self._ask(Reserve(sizes), Reserved)
                blocks = [
                    Block(serial, place, columns)
                    for serial, place, (columns, _) in zip(given.serials, given.offsets, encoded, strict=True)
                ]
                for place, (_, raws) in zip(given.offsets, encoded, strict=True):
                    self._arena.write(place, raws)
                self._ask(Commit(list(rows), blocks), Ack)
        return sum(sizes)

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, checked against the digests of their writer."""
        return self.get_many([key], columns)[key]

    def get_many(self, keys: Iterable[str], columns: Iterable[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
        """Columns of several rows, checked against the digests of their writers."""
        names = None if columns is None else list(columns)
        rows: dict[str, dict[str, np.ndarray]] = {key: {} for key in keys}
        pending, refused = list(rows), dict[str, list[int]]()
        with self._lock:
            while pending:
                located = self._ask(Locate(pending, names, with_bytes=self._arena is None), Located)
                wrong: dict[str, list[int]] = {}
                for key, blocks, read in zip(pending, located.rows, self._read(located), strict=True):
                    rows[key].clear()
                    for run, data in read:
                        rows[key] |= decode_columns(run, data)
                        if wrong_columns(run, data):
                            wrong[key] = [block.serial for block in blocks]
                # Other bytes than announced at the same place twice are wrong; elsewhere the row was written meanwhile.
                for key, serials in wrong.items():
                    if refused.get(key) == serials:
                        raise WrongDigest(f"row {key} of unit {self.address} has bytes that are not its writer's")
                refused, pending = wrong, list(wrong)
        return rows

    def drop(self, keys: Iterable[str]) -> int:
        """Forget rows; returns how many of them there were."""
        with self._lock:
            return self._ask(Drop(list(keys)), Ack).count

    def listing(self) -> dict[str, tuple[str, ...]]:
        """Keys of the rows held, with the names of their columns."""
        with self._lock:
            return self._ask(ListRows(), Listing).columns()

    def count(self) -> int:
        """Rows held."""
        with self._lock:
            return self._ask(Count(), Ack).count

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._close()

    def _read(self, located: Located) -> "list[list[tuple[list[Column], np.ndarray]]]":
        """For each row the runs of its columns and their bytes, all in one buffer."""
        found = [
            [_Read(block, run) for block in row for run in contiguous_columns(block.columns)] for row in located.rows
        ]
        pieces = [piece for row in found for piece in row]
        num_bytes = 0
        for piece in pieces:
            # As far from a multiple of the alignment as in the arena, so that neighbours there are neighbours here.
            piece.buffer_offset = -(-num_bytes // _ALIGN) * _ALIGN + piece.offset % _ALIGN
            num_bytes = piece.buffer_offset + piece.num_bytes
        buffer = np.empty(num_bytes, np.uint8)
        if self._arena is None:
            for piece in pieces:
                self._link.receive(
                    buffer[piece.buffer_offset : piece.buffer_offset + piece.num_bytes], self._deadline_s
                )
        else:
            for first, last in _contiguous_reads(pieces):
                self._arena.read(first.offset, buffer[first.buffer_offset : last.buffer_offset + last.num_bytes])
        return [
            [(piece.run, buffer[piece.buffer_offset : piece.buffer_offset + piece.num_bytes]) for piece in row]
            for row in found
        ]

    def _ask(self, request: Request, expected: type[T], body: Iterable[np.ndarray] = ()) -> T:
        """Send a request and what follows it; returns the answer expected, raises what another one means."""
        answer = self._exchange(request, body)
        match answer:
            case NotFound(what=what):
                raise KeyError(what)
            case Refused(why=why, is_full=True):
                raise StorageFull(f"unit {self.address}: {why}")
            case Refused(why=why):
                raise WrongDigest(f"unit {self.address}: {why}")
        assert isinstance(answer, expected), f"{answer} to {request}"
        return answer

    def _exchange(self, request: Request, body: Iterable[np.ndarray]) -> Answer:
        try:
            with waiting(f"unit {self.address}", type(request).__name__.lower(), self._deadline_s):
                send_frame(self._link, request, self._deadline_s)
                for raw in body:
                    self._link.send(raw, self._deadline_s)
                return receive_frame(self._link, ANSWERS, self._deadline_s)
        except LinkBroken as error:
            raise PeerGone(f"unit {self.address} is gone: {error}") from error


class _Read:
    """A run of columns of one block: its place in the arena, and where it goes in the reader's buffer."""

    __slots__ = ("buffer_offset", "num_bytes", "offset", "run")

    def __init__(self, block: Block, run: list[Column]) -> None:
        self.run = run
        self.offset = block.offset + run[0].start
        self.num_bytes = run[-1].start + run[-1].num_bytes - run[0].start
        self.buffer_offset = 0


def _contiguous_reads(reads: list[_Read]) -> list[tuple[_Read, _Read]]:
    """First and last piece of stretches that lie in the buffer as they lie in the arena."""
    found: list[tuple[_Read, _Read]] = []
    for piece in reads:
        if found and piece.offset - piece.buffer_offset == found[-1][0].offset - found[-1][0].buffer_offset:
            found[-1] = found[-1][0], piece
        else:
            found.append((piece, piece))
    return found


def _close(link: TcpLink, arena: ArenaFile | None) -> None:
    with contextlib.suppress(LinkBroken):  # the unit may be gone already
        send_frame(link, Goodbye(), _GOODBYE_S)
    link.close()
    if arena is not None:
        arena.close()
