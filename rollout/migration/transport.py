"""Moves the bytes of trajectories between rollouts: through shared memory on one host, else over a link.

On one host the bytes are in memory that the other process opens (`comm/memfd.py`). Threads of the caller's pool serve links, so that a slow network slows no
generator.
"""

import logging
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ...comm.errors import HeadraceError, PeerGone
from ...comm.fleet import Fleet, Member, is_shared
from ...comm.links.opening import Link, remote_backend
from ...comm.memfd import HEAD_BYTES, create_memory, open_memory, path_of
from ...comm.messages.migration import TransferOffered
from .codec import MovedRow, decode_rows, encode_rows

_log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
IO_THREADS = 8
"""Transfers at a time. Each ends by its deadline, so two rollouts that send to each other cannot block for good."""


class Outgoing(Protocol):
    """Trajectories that the destination fetches, available until `close`; `path` or `link` says where."""

    num_bytes: int
    path: str
    link: str
    seconds: float | None
    """Time to encode and to write or send them; None until that is done."""

    def close(self) -> None: ...


class Incoming(Protocol):
    """Trajectories on their way here."""

    @property
    def done(self) -> bool:
        """They are here, or the transfer has failed."""
        ...

    def rows(self) -> list[MovedRow]:
        """The trajectories of a transfer that is `done`. Raises `HeadraceError` if it failed."""
        ...


class Transfers(Protocol):
    """A rollout's transfers in both directions."""

    def send(self, to: Member, request_id: int, rows: Sequence[MovedRow]) -> Outgoing: ...

    def receive(self, sender: str, offer: TransferOffered) -> Incoming: ...

    def close(self) -> None: ...


class TransfersOfBytes:
    """Transfers between processes, with the threads that serve them.

    link_s: seconds without progress after which a link is given up.
    """

    def __init__(self, fleet: Fleet, link_s: float) -> None:
        self._fleet = fleet
        self._link_s = link_s
        self._io_pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix=f"{fleet.name} transfer")

    def send(self, to: Member, request_id: int, rows: Sequence[MovedRow]) -> "OutgoingTransfer":
        return OutgoingTransfer(self._fleet, self._io_pool, to, request_id, rows, self._link_s)

    def receive(self, sender: str, offer: TransferOffered) -> "IncomingTransfer":
        return IncomingTransfer(self._fleet, self._io_pool, offer, self._link_s)

    def close(self) -> None:
        self._io_pool.shutdown(cancel_futures=True)  # ends within `link_s`, the deadline of each step of a transfer


class OutgoingTransfer:
    """Bytes that the destination fetches, available until `close`."""

    def __init__(
        self,
        fleet: Fleet,
        io_pool: ThreadPoolExecutor,
        to: Member,
        request_id: int,
        rows: Sequence[MovedRow],
        link_s: float,
    ) -> None:
        started = time.monotonic()
        pieces = encode_rows(rows)
        self.num_bytes = sum(piece.nbytes for piece in pieces)
        self.path = self.link = ""
        self.seconds: float | None = None
        self._fd = -1
        self._open: Link | None = None
        if is_shared(to, fleet, fleet.settings):
            self._fd = create_memory("headrace trajectories", self.num_bytes)
            self.path = path_of(self._fd, os.getpid(), self._fd)
            with os.fdopen(self._fd, "wb", closefd=False) as file:
                file.seek(HEAD_BYTES)
                file.writelines(piece.data for piece in pieces)
            self.seconds = time.monotonic() - started
        else:
            self.link = f"{fleet.name}>{to.name} {fleet.incarnation}.{request_id}"
            io_pool.submit(self._send, fleet, pieces, time.monotonic() - started, link_s)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        elif self._open is not None:
            self._open.close()

    def _send(self, fleet: Fleet, pieces: list[np.ndarray], encode_s: float, link_s: float) -> None:
        """Send everything once. A failure is logged; the offer's deadline then ends the move."""
        try:
            self._open = link = fleet.open_link(self.link, 0, link_s, remote_backend(fleet.settings))
            started = time.monotonic()
            for piece in pieces:
                for at in range(0, piece.nbytes, CHUNK_BYTES):
                    link.send(piece[at : at + CHUNK_BYTES], link_s)
            self.seconds = encode_s + time.monotonic() - started
        except HeadraceError as error:
            _log.warning("%s: transfer over link %s failed: %s", fleet.name, self.link, str(error).partition("\n")[0])


class IncomingTransfer:
    """Bytes on their way here."""

    def __init__(self, fleet: Fleet, io_pool: ThreadPoolExecutor, offer: TransferOffered, link_s: float) -> None:
        fetch = _over_link if offer.link else _from_memory
        self._bytes: Future[np.ndarray] = io_pool.submit(fetch, fleet, offer, link_s)

    @property
    def done(self) -> bool:
        return self._bytes.done()

    def rows(self) -> list[MovedRow]:
        """The trajectories. Raises `PeerGone`, `LinkBroken` or `MessageRefused`."""
        return decode_rows(self._bytes.result(timeout=0))


def _from_memory(fleet: Fleet, offer: TransferOffered, link_s: float) -> np.ndarray:
    fd = open_memory(offer.path)
    try:
        # Private and writable, since torch takes no memory that it may not write to.
        memory = mmap.mmap(fd, HEAD_BYTES + offer.num_bytes, mmap.MAP_PRIVATE)
        return np.ndarray(offer.num_bytes, np.uint8, memory, HEAD_BYTES)
    except ValueError as error:
        raise PeerGone(f"{fleet.name}: transfer at {offer.path} is too short: {error}") from error
    finally:
        os.close(fd)


def _over_link(fleet: Fleet, offer: TransferOffered, link_s: float) -> np.ndarray:
    link = fleet.open_link(offer.link, 1, link_s, remote_backend(fleet.settings))
    try:
        payload = np.empty(offer.num_bytes, np.uint8)
        for at in range(0, offer.num_bytes, CHUNK_BYTES):
            link.receive(payload[at : at + CHUNK_BYTES], link_s)
        return payload
    finally:
        link.close()
