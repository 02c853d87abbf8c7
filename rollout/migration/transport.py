"""How freight gets from one rollout to another: through shared memory on one host, else over a link.

On one host the bytes lie in a memfd, which the other process opens as /proc/<pid>/fd/<number>: it has no name that could be
left over and ends with its holders. A link is served by a thread of its own at either end, so that nobody generates slower
for a slow network.
"""

import logging
import mmap
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...comm.errors import HeadraceError, PeerGone
from ...comm.fleet import Fleet, Member, is_shared
from ...comm.links.opening import Link, remote_backend
from ...comm.messages.migration import TransferOffered

_log = logging.getLogger(__name__)

LINK_S = 5.0
"""Seconds without progress after which a link is given up."""
CHUNK_BYTES = 1 << 20


class OutgoingTransfer:
    """Freight that waits for its receiver to fetch it, until `close`."""

    def __init__(self, fleet: Fleet, to: Member, request_id: int, pieces: list[np.ndarray]) -> None:
        self.num_bytes = sum(piece.nbytes for piece in pieces)
        self.path = self.link = ""
        self.seconds: float | None = None
        """What bringing it under way took; None until that is over."""
        self._fd = -1
        started = time.monotonic()
        if is_shared(to, fleet, fleet.settings):
            self._fd = os.memfd_create("headrace freight")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
            for piece in pieces:
                _write(self._fd, piece)
            self.seconds = time.monotonic() - started
        else:
            self.link = f"{fleet.name}>{to.name} {fleet.incarnation}.{request_id}"
            self._open: Link | None = None
            threading.Thread(
                target=self._send, args=(fleet, pieces), name=f"{fleet.name} freight {request_id}", daemon=True
            ).start()

    def close(self) -> None:
        """Nobody needs it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        elif self.link and self._open is not None:
            self._open.close()

    def _send(self, fleet: Fleet, pieces: list[np.ndarray]) -> None:
        """Send everything once. Waits for the other end; a link that fails is noticed by what follows from it."""
        try:
            self._open = link = fleet.open_link(self.link, 0, LINK_S, remote_backend(fleet.settings))
            started = time.monotonic()
            for piece in pieces:
                for at in range(0, piece.nbytes, CHUNK_BYTES):
                    link.send(piece[at : at + CHUNK_BYTES], LINK_S)
            self.seconds = time.monotonic() - started
        except HeadraceError as error:
            _log.warning("%s: freight over %s: %s", fleet.name, self.link, str(error).partition("\n")[0])


class IncomingTransfer:
    """Freight that is being fetched; `result` has its bytes, uint8 [num_bytes], once it is `done`."""

    def __init__(self, fleet: Fleet, io_pool: ThreadPoolExecutor, offer: TransferOffered) -> None:
        self._bytes: Future[np.ndarray] = io_pool.submit(_over_link if offer.link else _from_memory, fleet, offer)

    @property
    def done(self) -> bool:
        """It is here, or has failed."""
        return self._bytes.done()

    def result(self) -> np.ndarray:
        """The bytes. Raises `PeerGone` or `LinkBroken` if they did not come."""
        return self._bytes.result()


def _from_memory(fleet: Fleet, offer: TransferOffered) -> np.ndarray:
    try:
        fd = os.open(offer.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerGone(f"{fleet.name}: no freight at {offer.path}: {error}") from error
    try:
        # Private and writable, since torch takes no memory that it may not write to.
        return np.ndarray(offer.num_bytes, np.uint8, mmap.mmap(fd, offer.num_bytes, mmap.MAP_PRIVATE))
    except ValueError as error:
        raise PeerGone(f"{fleet.name}: freight at {offer.path} is short: {error}") from error
    finally:
        os.close(fd)


def _over_link(fleet: Fleet, offer: TransferOffered) -> np.ndarray:
    link = fleet.open_link(offer.link, 1, LINK_S, remote_backend(fleet.settings))
    try:
        freight = np.empty(offer.num_bytes, np.uint8)
        for at in range(0, offer.num_bytes, CHUNK_BYTES):
            link.receive(freight[at : at + CHUNK_BYTES], LINK_S)
        return freight
    finally:
        link.close()


def _write(fd: int, piece: np.ndarray) -> None:
    view = piece.data
    while view:
        view = view[os.write(fd, view) :]
