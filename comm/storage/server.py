"""A storage unit: rows in an arena, and the threads that serve its clients, one each.

A client on this host writes and reads the arena itself and tells the unit only what lies where; from another host the
bytes come and go on its connection. A block is written before it is committed, so no row ever shows bytes that are not
there yet. A place is given out again once its row was dropped, even while somebody still reads it: the reader's digest tells.

The kernel closes the connections of a process that dies, so a connection that ends without a goodbye is a sign of death. The
unit reports it, unless the same incarnation of the process has another connection, or opens one within `REATTACH_S`.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from ..errors import LinkBroken, StorageFull
from ..links.base import authenticate
from ..links.tcp import TcpLink
from .arena import Arena, physical_bytes
from .codec import LINK_NAME, contiguous_columns, receive_frame, send_frame, wrong_columns
from .index import Allocation, RowIndex
from .protocol import (
    ATTACHMENTS,
    REQUESTS,
    Ack,
    Answer,
    Attach,
    Block,
    Commit,
    Count,
    Drop,
    Goodbye,
    Hello,
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

log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_TRANSFER_S = 60.0
REATTACH_S = 0.2
_IDLE_S = 1e9  # a client may be silent as long as it likes; its end closes the connection


class StorageServer:
    """A storage unit in this process, on one interface; `address` is "host:port". It ends with `close`.

    `on_client_lost` is called, from any thread, with the name and incarnation of a process whose connection broke.
    """

    def __init__(
        self,
        interface: str,
        secret: bytes = b"",
        capacity_bytes: int | None = None,
        on_client_lost: Callable[[str, int], None] = lambda member, incarnation: None,
    ) -> None:
        self._on_client_lost = on_client_lost
        self._closing = threading.Event()
        self.arena = Arena(capacity_bytes or physical_bytes())
        self._table = RowIndex()
        self._secret = secret
        self._serial = 0
        self._lock = threading.Lock()
        self._links: dict[TcpLink, Attach | None] = {}
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((interface, 0), backlog=1024)
        self.address = f"{interface}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="row unit", daemon=True)
        self._accepting.start()

    def drop(self, keys: Iterable[str]) -> int:
        """Forget rows; returns how many of them there were. Dropping again is allowed and drops nothing."""
        with self._lock:
            return self._drop(keys)

    def listing(self) -> dict[str, tuple[str, ...]]:
        """Keys of the rows held, with the names of their columns."""
        with self._lock:
            return self._table.listing().columns()

    def close(self) -> None:
        """Forget all rows, turn clients away and end the threads."""
        self._closing.set()
        with contextlib.suppress(OSError):  # already shut down
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        for thread in self._threads:
            thread.join()
        self.arena.close()

    def _accept(self) -> None:
        """Give each client a thread. Waits for connections; ended by `close`."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            link = TcpLink(connection)
            with self._lock:
                self._links[link] = None
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._serve, args=(link,), name="row client", daemon=True))
            self._threads[-1].start()

    def _serve(self, link: TcpLink) -> None:
        """Answer one client until it is gone; what it reserved and never committed is free then."""
        reserved: dict[int, Allocation] = {}
        is_broken = False
        try:
            authenticate(link, LINK_NAME, 0, self._secret, _HANDSHAKE_S)
            client = receive_frame(link, ATTACHMENTS, _HANDSHAKE_S)
            with self._lock:
                self._links[link] = client
            send_frame(link, Hello(self.arena.path, self.arena.magic), _TRANSFER_S)
            while not isinstance(request := receive_frame(link, REQUESTS, _IDLE_S), Goodbye):
                send_frame(link, answer := self._answer(link, request, reserved), _TRANSFER_S)
                if isinstance(request, Locate) and request.with_bytes and isinstance(answer, Located):
                    self._send_bytes(link, answer)
        except LinkBroken as error:
            is_broken = True
            log.debug("a client of unit %s has gone: %s", self.address, error)
        except msgspec.DecodeError as error:
            log.warning("unit %s ends a connection that speaks something else: %s", self.address, error)
        finally:
            with self._lock:
                client = self._links.pop(link)
                self._free(list(reserved.values()))
            link.close()
        if is_broken and client is not None and client.member:
            self._report_lost(client)

    def _report_lost(self, client: Attach) -> None:
        """Report a process as lost. Waits until it may have attached again; woken by `close`."""
        if self._closing.wait(REATTACH_S):
            return
        with self._lock:
            is_attached = client in self._links.values()
        if not is_attached:
            self._on_client_lost(client.member, client.incarnation)

    def _answer(self, link: TcpLink, request: Request, reserved: dict[int, Allocation]) -> Answer:
        try:
            if isinstance(request, Put):
                return self._receive(link, request)
            with self._lock:
                return self._act(request, reserved)
        except KeyError as error:
            return NotFound(str(error.args[0]))
        except StorageFull as error:
            return Refused(str(error), is_full=True)

    def _act(self, request: Request, reserved: dict[int, Allocation]) -> Answer:
        match request:
            case Reserve(sizes=sizes):
                spans = self._reserve(sizes)
                reserved |= spans
                return Reserved([span.offset for span in spans.values()], list(spans))
            case Commit(keys=keys, blocks=blocks):
                if not all(reserved.get(b.serial) == Allocation(b.offset, b.num_bytes) for b in blocks):
                    return Refused("a block that this client has not reserved", is_full=False)
                self._commit(keys, blocks)
                for block in blocks:
                    del reserved[block.serial]
                return Ack(len(keys))
            case Locate(keys=keys, columns=columns):
                return Located([self._table.locate(key, columns) for key in keys])
            case Drop(keys=keys):
                return Ack(self._drop(keys))
            case ListRows():
                return self._table.listing()
            case Count():
                return Ack(len(self._table))
        raise AssertionError(f"no rule for {request}")

    def _reserve(self, sizes: list[int]) -> dict[int, Allocation]:
        """Spans by serial; all or none."""
        spans: dict[int, Allocation] = {}
        try:
            for size in sizes:
                place = self.arena.reserve(size)
                self._serial += 1
                spans[self._serial] = Allocation(place, size)
        except StorageFull:
            self._free(list(spans.values()))
            raise
        return spans

    def _commit(self, keys: list[str], blocks: list[Block]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._free(self._table.add(key, block, Allocation(block.offset, block.num_bytes)))

    def _drop(self, keys: Iterable[str]) -> int:
        freed = [self._table.drop(key) for key in keys]
        self._free([span for spans in freed for span in spans or ()])
        return sum(spans is not None for spans in freed)

    def _free(self, allocations: list[Allocation]) -> None:
        for span in allocations:
            self.arena.free(span.offset, span.num_bytes)

    def _receive(self, link: TcpLink, request: Put) -> Answer:
        """Take in blocks whose bytes follow; all of them, or none if one is not what its writer says."""
        kept: list[Block] = []
        refusal: Refused | None = None
        for block in request.blocks:
            data = np.empty(block.num_bytes, np.uint8)
            link.receive(data, _TRANSFER_S)  # also after a refusal: the next frame lies behind them
            if refusal is None and (wrong := wrong_columns(block.columns, data)):
                refusal = Refused(f"bytes of {', '.join(wrong)} are not those of their writer", is_full=False)
            try:
                kept += [] if refusal else [self._write(block, data)]
            except StorageFull as error:
                refusal = Refused(str(error), is_full=True)
        with self._lock:
            if refusal is None:
                self._commit(request.keys, kept)
            else:
                self._free([Allocation(block.offset, block.num_bytes) for block in kept])
        return refusal or Ack(len(kept))

    def _write(self, block: Block, data: np.ndarray) -> Block:
        with self._lock:
            ((serial, span),) = self._reserve([data.nbytes]).items()
        self.arena.write(span.offset, [data])
        return msgspec.structs.replace(block, serial=serial, offset=span.offset)

    def _send_bytes(self, link: TcpLink, located: Located) -> None:
        for block in (block for row in located.rows for block in row):
            for run in contiguous_columns(block.columns):
                data = np.empty(sum(column.num_bytes for column in run), np.uint8)
                self.arena.read(block.offset + run[0].start, data)
                link.send(data, _TRANSFER_S)
