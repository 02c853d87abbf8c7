"""A client of a storage unit: each relay hosts a unit, and every process that needs columns of a row reads them from there.

A row is stored under a key: named columns of any plain type and length, added one by one or together. On the unit's host the
bytes go directly to and from the unit's memory; from another host they go over the connection. Either way a reader checks
them against the digests that the writer took.
"""

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..errors import LinkBroken, MessageRefused, PeerGone, StorageFull, WrongDigest
from ..links.frames import receive_frame, send_frame
from ..links.handshake import authenticate
from ..links.host import host_id, split_address
from ..links.tcp import TcpLink
from ..links.tls import TlsIdentity
from ..memfd import open_memory
from ..waits import waiting
from .arena import ArenaFile, round_up
from .codec import decode_columns, encode_columns, wrong_columns
from .protocol import (
    ANSWERS,
    HELLOS,
    LINK_NAME,
    Ack,
    Block,
    Commit,
    Drop,
    Listing,
    ListRows,
    Locate,
    Located,
    NotFound,
    Refused,
    Request,
    Reserve,
    Reserved,
)

T = TypeVar("T")

Columns = Mapping[str, np.ndarray]


class StorageClient:
    """One unit's client. Any thread may use it, one at a time. Raises `PeerGone` when the unit is gone.

    `through_memory=False` sends the bytes over the connection even on the unit's own host.
    """

    def __init__(
        self,
        address: str,
        secret: bytes = b"",
        deadline_s: float = 30.0,
        through_memory: bool = True,
        tls: TlsIdentity | None = None,
    ) -> None:
        self.address = address
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._arena: ArenaFile | None = None
        with self._waiting("a connection"):
            self._link = TcpLink(socket.create_connection(split_address(address), deadline_s))
            authenticate(self._link, LINK_NAME, 1, secret, deadline_s, tls)
            hello = receive_frame(self._link, HELLOS, deadline_s)
        if through_memory and hello.host == host_id():
            with contextlib.suppress(PeerGone):  # the unit's user may have closed its memory to others
                self._arena = ArenaFile(open_memory(hello.path))
        self._close = weakref.finalize(self, _close, self._link, self._arena)

    def put(self, key: str, columns: Columns) -> int:
        """Add columns to a row, which begins with its first; returns their bytes once the unit has them.

        A column that the row has already is replaced as a whole; the others stay as they are. Raises `StorageFull`, and
        `ValueError` for columns of objects.
        """
        return self.put_many({key: columns})

    def put_many(self, rows: Mapping[str, Columns]) -> int:
        """`put` for several rows at once; a reader sees all of it or none."""
        encoded = [encode_columns(columns) for columns in rows.values()]
        sizes = [sum(raw.nbytes for raw in raws) for _, raws in encoded]
        with self._lock:
            given = self._ask(Reserve(sizes), Reserved)
            blocks: list[Block] = []
            bodies: list[np.ndarray] = []
            for serial, offset, (columns, raws) in zip(given.serials, given.offsets, encoded, strict=True):
                blocks.append(Block(serial, offset, columns))
                if self._arena is None:
                    bodies += raws
                else:
                    self._arena.write(offset, raws)
            self._ask(Commit(list(rows), blocks, with_bytes=self._arena is None), Ack, bodies)
        return sum(sizes)

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, all or those named.

        Raises `KeyError` if the unit does not hold one of them, `WrongDigest` if the bytes are not those that were put.
        """
        return self.get_many([key], columns)[key]

    def get_many(self, keys: Iterable[str], columns: Iterable[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
        """`get` for several rows at once. They share one buffer, which lives as long as any column of them."""
        names = None if columns is None else list(columns)
        rows: dict[str, dict[str, np.ndarray]] = {key: {} for key in keys}
        pending = list(rows)
        refused = dict[str, list[int]]()
        with self._lock:
            while pending:
                located = self._ask(Locate(pending, names, with_bytes=self._arena is None), Located).rows
                wrong: dict[str, list[int]] = {}
                for key, blocks, buffers in zip(pending, located, self._read(located), strict=True):
                    rows[key].clear()
                    for block, data in zip(blocks, buffers, strict=True):
                        rows[key] |= decode_columns(block.columns, data)
                        if wrong_columns(block.columns, data):
                            wrong[key] = [block.serial for block in blocks]
                # Wrong bytes in the same blocks twice are corrupt. In other blocks the row was written between the two reads.
                for key, serials in wrong.items():
                    if refused.get(key) == serials:
                        raise WrongDigest(f"row {key} of unit {self.address}: the bytes do not match their digest")
                refused = wrong
                pending = list(wrong)
        return rows

    def drop(self, keys: Iterable[str]) -> int:
        """Drop rows; returns how many of them the unit held. Dropping again is allowed."""
        with self._lock:
            return self._ask(Drop(list(keys)), Ack).count

    def listing(self) -> list[str]:
        """The keys of the rows held."""
        with self._lock:
            return self._ask(ListRows(), Listing).keys

    def close(self) -> None:
        """End the connection; the rows stay. Closing twice is allowed."""
        with self._lock:
            self._close()

    def _read(self, rows: Sequence[Sequence[Block]]) -> list[list[np.ndarray]]:
        """The bytes of each block of each row, all in one buffer."""
        buffer = np.empty(sum(round_up(block.num_bytes) for row in rows for block in row), np.uint8)
        end = 0
        found: list[list[np.ndarray]] = [[] for _ in rows]
        with self._waiting("columns"):
            for row, buffers in zip(rows, found, strict=True):
                for block in row:
                    data = buffer[end : end + block.num_bytes]
                    end += round_up(block.num_bytes)
                    if self._arena is None:
                        self._link.receive(data, self._deadline_s)
                    else:
                        self._arena.read(block.first_byte, data)
                    buffers.append(data)
        return found

    def _ask(self, request: Request, expected: type[T], bodies: Iterable[np.ndarray] = ()) -> T:
        """Send a request and the bytes that follow it; returns the expected answer, raises what another answer means."""
        with self._waiting(type(request).__name__.lower()):
            send_frame(self._link, request, self._deadline_s)
            for raw in bodies:
                self._link.send(raw, self._deadline_s)
            answer = receive_frame(self._link, ANSWERS, self._deadline_s)
            if not isinstance(answer, (expected, NotFound, Refused)):
                raise MessageRefused(f"{type(answer).__name__} does not answer {type(request).__name__}")
        match answer:
            case NotFound(what=what):
                raise KeyError(what)
            case Refused(why=why, is_full=is_full):
                raise (StorageFull if is_full else WrongDigest)(f"unit {self.address}: {why}")
        return answer

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """A wait for the unit; a broken connection raises `PeerGone`."""
        try:
            with waiting(f"unit {self.address}", what, self._deadline_s):
                yield
        except (OSError, LinkBroken, MessageRefused) as error:
            raise PeerGone(f"unit {self.address} is gone: {error}") from error


def _close(link: TcpLink, arena: ArenaFile | None) -> None:
    link.close()
    if arena is not None:
        arena.close()
