"""A storage unit: rows in an arena, and a thread for each client.

A client on this host writes and reads the arena itself and sends the unit only metadata. For a client on another host the
bytes go over its connection. A block is written before it is committed, so a row never shows bytes that are not written yet.
Memory is reused once its row is dropped, even while a client still reads it: the reader detects that by the digest.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterable

import numpy as np

from ..errors import LinkBroken, MessageRefused, StorageFull, WrongDigest
from ..links.frames import receive_frame, send_frame
from ..links.handshake import authenticate
from ..links.host import host_id, listen
from ..links.tcp import TcpLink
from ..links.tls import TlsIdentity
from ..waits import join_thread
from .arena import Arena, memory_limit
from .codec import wrong_columns
from .index import Allocation, RowIndex
from .protocol import (
    LINK_NAME,
    REQUESTS,
    Ack,
    Answer,
    Block,
    Commit,
    Drop,
    Hello,
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

log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_TRANSFER_S = 60.0
MOST_STRANGERS = 256
"""Most connections that have not finished the handshake; beyond that the oldest is closed, so they cost few threads."""
_IDLE_S = 1e9  # a client may be idle for the whole run; the end of its process closes the connection
_CLOSE_S = 10.0
_RETRY_S = 0.1


class StorageServer:
    """A storage unit in this process, on one interface; `address` is "host:port". It serves from `start` to `close`."""

    def __init__(
        self,
        interface: str,
        secret: bytes = b"",
        capacity_bytes: int | None = None,
        tls: TlsIdentity | None = None,
    ) -> None:
        self._closing = threading.Event()
        self.arena = Arena(capacity_bytes or memory_limit())
        self._index = RowIndex()
        self._secret = secret
        self._tls = tls
        self._serial = 0
        self._lock = threading.Lock()
        self._links: dict[TcpLink, bool] = {}
        """Connections, and whether each has proved the secret."""
        self._listener, self.address = listen(interface)
        self._threads = [threading.Thread(target=self._accept, name=f"storage unit {self.address}", daemon=True)]

    def start(self) -> "StorageServer":
        """Begin to accept clients; returns the unit."""
        self._threads[0].start()
        return self

    def drop(self, keys: Iterable[str]) -> int:
        """Drop rows; returns how many of them the unit held. Dropping again is allowed."""
        with self._lock:
            freed = [self._index.drop(key) for key in keys]
            self._free(allocation for allocations in freed for allocation in allocations or ())
        return sum(allocations is not None for allocations in freed)

    def listing(self) -> list[str]:
        """The keys of the rows held."""
        with self._lock:
            return self._index.listing()

    def close(self) -> None:
        """Drop all rows, disconnect the clients and end the threads."""
        self._closing.set()
        with contextlib.suppress(OSError):  # already shut down
            self._listener.shutdown(socket.SHUT_RDWR)
        join_thread(self._threads[0], _CLOSE_S)
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        for thread in self._threads:
            join_thread(thread, _CLOSE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self.arena.close()

    def _accept(self) -> None:
        """Give each client a thread. Waits for connections; ended by `close`."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                log.warning("unit %s cannot accept a connection, and tries again: %s", self.address, error)
                self._closing.wait(_RETRY_S)  # the process has no descriptor left; clients that leave free theirs
                continue
            link = TcpLink(connection)
            with self._lock:
                strangers = [each for each, is_proved in self._links.items() if not is_proved]
                self._links[link] = False
            if len(strangers) >= MOST_STRANGERS:
                strangers[0].close()  # a client proves in milliseconds that it is one
            name = f"{threading.current_thread().name}, client {connection.fileno()}"
            thread = threading.Thread(target=self._serve, args=(link,), name=name, daemon=True)
            thread.start()
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _serve(self, link: TcpLink) -> None:
        """Answer one client until its connection ends; then free what it reserved and never committed."""
        reserved: dict[int, Allocation] = {}
        try:
            authenticate(link, LINK_NAME, 0, self._secret, _HANDSHAKE_S, self._tls)
            with self._lock:
                self._links[link] = True
            send_frame(link, Hello(host_id(), self.arena.path), _TRANSFER_S)
            while True:
                request = receive_frame(link, REQUESTS, _IDLE_S)
                send_frame(link, answer := self._answer(link, request, reserved), _TRANSFER_S)
                if isinstance(request, Locate) and request.with_bytes and isinstance(answer, Located):
                    self._send_bytes(link, answer)
        except LinkBroken as error:
            log.debug("a client of unit %s has disconnected: %s", self.address, error)
        except MessageRefused as error:
            log.warning("unit %s closes a connection that sent a malformed frame: %s", self.address, error)
        finally:
            with self._lock:
                del self._links[link]
                self._free(reserved.values())
            link.close()

    def _answer(self, link: TcpLink, request: Request, reserved: dict[int, Allocation]) -> Answer:
        try:
            match request:
                case Reserve(sizes=sizes):
                    return self._reserve(sizes, reserved)
                case Commit():
                    return self._commit(link, request, reserved)
                case Locate(keys=keys, columns=columns):
                    with self._lock:
                        return Located([self._index.locate(key, columns) for key in keys])
                case Drop(keys=keys):
                    return Ack(self.drop(keys))
                case ListRows():
                    return Listing(self.listing())
        except KeyError as error:
            return NotFound(str(error.args[0]))
        except (StorageFull, WrongDigest) as error:
            self._release(reserved)
            return Refused(str(error), is_full=isinstance(error, StorageFull))
        raise AssertionError(f"no rule for {request}")

    def _reserve(self, sizes: list[int], reserved: dict[int, Allocation]) -> Reserved:
        self._release(reserved)
        with self._lock:
            for size in sizes:
                self._serial += 1
                reserved[self._serial] = Allocation(self.arena.reserve(size), size)
        return Reserved([allocation.offset for allocation in reserved.values()], list(reserved))

    def _commit(self, link: TcpLink, request: Commit, reserved: dict[int, Allocation]) -> Ack:
        bodies = [self._received(link, block) for block in request.blocks] if request.with_bytes else []
        if any(reserved.get(b.serial) != Allocation(b.offset, b.num_bytes) for b in request.blocks):
            raise WrongDigest("a block that this client has not reserved")
        for block, data in zip(request.blocks, bodies, strict=False):
            if wrong := wrong_columns(block.columns, data):
                raise WrongDigest(f"the bytes of {', '.join(wrong)} do not match their digest")
            self.arena.write(block.offset, [data])
        with self._lock:
            for key, block in zip(request.keys, request.blocks, strict=True):
                self._free(self._index.add(key, block, reserved.pop(block.serial)))
        return Ack(len(request.keys))

    def _release(self, reserved: dict[int, Allocation]) -> None:
        with self._lock:
            self._free(reserved.values())
        reserved.clear()

    def _free(self, allocations: Iterable[Allocation]) -> None:
        for allocation in allocations:
            self.arena.free(allocation.offset, allocation.num_bytes)

    def _received(self, link: TcpLink, block: Block) -> np.ndarray:
        data = np.empty(block.num_bytes, np.uint8)
        link.receive(data, _TRANSFER_S)
        return data

    def _send_bytes(self, link: TcpLink, located: Located) -> None:
        for block in (block for row in located.rows for block in row):
            data = np.empty(block.num_bytes, np.uint8)
            self.arena.read(block.first_byte, data)
            link.send(data, _TRANSFER_S)
