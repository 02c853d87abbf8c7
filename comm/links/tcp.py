"""Links over plain TCP sockets: the fastest way to notice that a neighbour is dead."""

import contextlib
import socket
import struct
import time

import numpy as np

from ..errors import LinkBroken
from ..store import StoreClient
from ..waits import waiting
from .base import authenticate

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))


class TcpLink:
    """One end of a TCP connection."""

    backend = "tcp"

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._timeouts: dict[int, float] = {}
        # The kernel keeps the deadlines: it then moves a whole buffer in one call, without a poll for every segment.
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @staticmethod
    def open(store: StoreClient, name: str, end: int, deadline_s: float, secret: bytes, interface: str) -> "TcpLink":
        """End 0 listens and says where; end 1 connects. A stranger who connects first is turned away."""
        key = f"link/{name}"
        return _listen(store, key, name, deadline_s, secret, interface) if end == 0 else _connect(
            store, key, name, deadline_s, secret
        )  # fmt: skip

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Send all bytes."""
        try:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            self._socket.sendall(buffer.data)
        except OSError as error:
            raise self._broken("send", error) from error

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        """Fill the buffer."""
        view = buffer.data
        try:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            while view:
                if not (num_bytes := self._socket.recv_into(view, 0, socket.MSG_WAITALL)):
                    raise ConnectionResetError("closed by the other end")
                view = view[num_bytes:]
        except OSError as error:
            raise self._broken("receive", error) from error

    def close(self) -> None:
        """Close the socket; a thread that waits in it is woken."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        if self._timeouts.get(option) != seconds:
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
            )
            self._timeouts[option] = seconds

    def _broken(self, what: str, error: OSError) -> LinkBroken:
        self.close()
        why = "the other end did nothing before the deadline" if isinstance(error, BlockingIOError) else str(error)
        return LinkBroken(f"{what}: {why}")


def _listen(store: StoreClient, key: str, name: str, deadline_s: float, secret: bytes, interface: str) -> TcpLink:
    until = time.monotonic() + deadline_s
    with socket.create_server((interface, 0), backlog=8) as listener:
        store.set(key, f"{interface}:{listener.getsockname()[1]}")
        try:
            while True:
                listener.settimeout(max(until - time.monotonic(), 1e-3))
                link = TcpLink(listener.accept()[0])
                try:
                    authenticate(link, name, 0, secret, max(until - time.monotonic(), 1e-3))
                except LinkBroken:
                    link.close()
                else:
                    return link
        except OSError as error:
            raise LinkBroken(f"link {name}: nobody connected within {deadline_s:.0f} s") from error
        finally:
            store.delete_key(key)


def _connect(store: StoreClient, key: str, name: str, deadline_s: float, secret: bytes) -> TcpLink:
    with waiting(f"end 0 of link {name}", "its address", deadline_s) as wait:
        wait.until(lambda: store.check([key]), interval_s=0.001)
        host, _, port = store.get(key).decode().rpartition(":")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.settimeout(wait.remaining_s)
        try:
            connection.connect((host, int(port)))
        except OSError as error:
            connection.close()
            raise LinkBroken(f"link {name}: {error}") from error
        link = TcpLink(connection)
        authenticate(link, name, 1, secret, wait.remaining_s)
        return link
