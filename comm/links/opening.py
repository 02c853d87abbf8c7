"""Links: one interface, two ends, raw bytes in both directions, a deadline on every operation.

What one end sends in pieces, the other end receives in the same pieces. A link that fails raises `LinkBroken` and is of no
more use; whoever needs to go on opens another and agrees on the byte to go on from. Back ends:

    tcp     plain sockets: a dead neighbour is noticed at once
    nccl    a process group of two ranks on two different GPUs, through buckets on each
    staged  its twin on CPU: Gloo, through buckets in host memory
    memory  the twin within one process

Both ends prove that they know the run's secret before the link is handed over.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch.distributed import DistError

from ..errors import LinkBroken, SettingError
from ..store import StoreClient, connect_store
from ..waits import waiting
from .base import Link
from .process_group import open_group
from .staged import StagedLink
from .tcp import TcpLink

_PIPE_BYTES = 64 << 20
_CREDIT_S = 2e-3


def open_link(
    backend: str,
    store_address: str,
    name: str,
    end: int,
    deadline_s: float,
    *,
    secret: bytes = b"",
    interface: str = "127.0.0.1",
    store: StoreClient | None = None,
) -> Link:
    """Open end 0 or 1 of the link `name`; returns once both ends are there and each has proved to know `secret`.

    A name is good for one link. Raises `LinkBroken` if the other end does not come within `deadline_s`. The ends find each
    other on the store at `store_address`; `store` is a client of it that may be used for questions that do not wait.
    """
    assert end in (0, 1), end
    if backend not in ("tcp", "nccl", "staged"):
        raise SettingError(f"comm.link: {backend!r} is not a back end of a link between processes; use tcp or nccl")
    if backend == "nccl" and not torch.cuda.is_available():
        raise SettingError("comm.link: nccl needs a GPU at both ends, and here is none")
    try:
        if store is None or backend != "tcp":
            store = connect_store(store_address, deadline_s)
        with waiting(f"end {1 - end} of link {name}", f"{backend} connection", deadline_s):
            if backend == "tcp":
                return TcpLink.open(store, name, end, deadline_s, secret, interface)
            group = open_group("nccl" if backend == "nccl" else "gloo", store, name, end, deadline_s, interface)
            beside = TcpLink.open(store, f"{name}/beside", end, deadline_s, secret, interface)
            return StagedLink(backend, group, end, torch.device("cuda" if backend == "nccl" else "cpu"), beside)
    except DistError as error:
        raise LinkBroken(f"link {name}: {error}") from error


class _Pipe:
    """Bytes on their way in one direction of a memory link."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pieces: deque[np.ndarray] = deque()
        self.num_bytes = 0
        self.closed = False


class MemoryLink:
    """The twin within one process. The pieces need not match; at most 64 MiB are under way before `send` waits."""

    backend = "memory"

    def __init__(self, out: _Pipe, into: _Pipe) -> None:
        self._out = out
        self._into = into

    @staticmethod
    def pair() -> "tuple[MemoryLink, MemoryLink]":
        """Both ends of a new link."""
        there, back = _Pipe(), _Pipe()
        return MemoryLink(there, back), MemoryLink(back, there)

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send a copy of all bytes."""
        pipe, until = self._out, time.monotonic() + deadline_s
        with pipe.changed:
            while pipe.num_bytes > _PIPE_BYTES and not pipe.closed:
                _await(pipe, until, "send")
            if pipe.closed:
                raise LinkBroken("send: the link is closed")
            pipe.pieces.append(buffer.copy())
            pipe.num_bytes += buffer.nbytes
            pipe.changed.notify_all()

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill the buffer."""
        pipe, until, filled = self._into, time.monotonic() + deadline_s, 0
        with pipe.changed:
            while filled < buffer.nbytes:
                if not pipe.pieces:
                    if pipe.closed:
                        raise LinkBroken(f"receive: the link is closed after {filled} of {buffer.nbytes} bytes")
                    _await(pipe, until, "receive")
                    continue
                piece = pipe.pieces.popleft()
                taken = min(piece.nbytes, buffer.nbytes - filled)
                buffer[filled : filled + taken] = piece[:taken]
                if taken < piece.nbytes:
                    pipe.pieces.appendleft(piece[taken:])
                filled += taken
                pipe.num_bytes -= taken
                pipe.changed.notify_all()

    def close(self) -> None:
        """End both directions; what was sent before can still be received."""
        for pipe in (self._out, self._into):
            with pipe.changed:
                pipe.closed = True
                pipe.changed.notify_all()


def _await(pipe: _Pipe, until: float, what: str) -> None:
    if not pipe.changed.wait(until - time.monotonic()):
        raise LinkBroken(f"{what}: the other end did nothing before the deadline")


class ThrottledLink:
    """A link held to `bytes_per_s` on its way out: a slow network on a fast machine. Bytes arrive when the last has left."""

    def __init__(
        self,
        link: Link,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.backend = link.backend
        self._link = link
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._free_at = 0.0

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes, no faster than the pace."""
        now = self._now()
        # Sleep overshoots; what a piece came too late, the next may make up for.
        self._free_at = max(self._free_at, now - _CREDIT_S) + buffer.nbytes / self._bytes_per_s
        self._sleep(max(0.0, self._free_at - now))
        self._link.send(buffer, deadline_s)

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill the buffer."""
        self._link.receive(buffer, deadline_s)

    def close(self) -> None:
        """End the link."""
        self._link.close()


def throttled(link: Link, bytes_per_s: float | None) -> Link:
    """The link, held to a pace if there is one."""
    return link if bytes_per_s is None else ThrottledLink(link, bytes_per_s)
