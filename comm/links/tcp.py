"""Links over plain TCP sockets. A socket reports a dead neighbour sooner than any other back end."""

import contextlib
import select
import socket
import ssl
import struct
from typing import TYPE_CHECKING

from ..errors import LinkBroken

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

    import numpy as np

    from .tls import TlsIdentity

_UNANSWERED_MS = 20_000
"""Milliseconds without an acknowledgement by the other host after which a connection breaks."""
_TLS_PIECE = 1 << 18
_TLS_BYTES = 1 << 30  # ssl takes less than 2 GiB in one call
_TLS_WAIT_S = 1e6  # and less than 2**31 ms
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))


def keep_alive(connection: "socket.socket | TransportSocket") -> None:
    """Send small pieces at once, and notice a host that is gone or cut off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TcpLink:
    """One end of a TCP connection, encrypted from `start_tls` on."""

    backend = "tcp"

    def __init__(self, connection: socket.socket) -> None:
        self._socket: socket.socket | ssl.SSLSocket = connection
        self._timeouts: dict[int, float] = {}
        # The kernel keeps the deadlines: it then moves a whole buffer in one call, without a poll for every segment.
        connection.settimeout(None)
        keep_alive(connection)

    def start_tls(self, tls: "TlsIdentity", end: int, deadline_s: float) -> bytes:
        """Encrypt everything that follows; returns the channel binding, 32 bytes that only the two ends of this connection know."""
        try:
            self._socket = connection = tls.wrap(self._socket, end)
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            connection.do_handshake()
            return tls.binding(connection, end)
        except (OSError, ValueError) as error:  # a connection that ends within the handshake is a ValueError for ssl
            raise self._broken("TLS handshake", OSError(str(error))) from error

    def send(self, buffer: "np.ndarray | bytes", deadline_s: float) -> None:
        view = memoryview(buffer)  # pyright: ignore[reportArgumentType] - numpy's stubs do not say that arrays are buffers
        try:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            if not isinstance(self._socket, ssl.SSLSocket):
                self._socket.sendall(view)
                return
            while view:  # the deadline is for a piece, as the kernel's is: a slow link that goes on is not broken
                view = view[self._socket.send(view[:_TLS_PIECE]) :]
        except OSError as error:
            raise self._broken("send", error) from error

    def receive(self, buffer: "np.ndarray | bytearray", deadline_s: float) -> None:
        view = memoryview(buffer)  # pyright: ignore[reportArgumentType] - numpy's stubs do not say that arrays are buffers
        try:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            while view:
                if not (num_bytes := self._receive_into(view)):
                    raise ConnectionResetError("closed by the other end")
                view = view[num_bytes:]
        except OSError as error:
            raise self._broken("receive", error) from error

    def release(self) -> "socket.socket | ssl.SSLSocket":
        """Hand the socket over to the caller."""
        return self._socket

    def is_closed(self) -> bool:
        """Whether this end is closed, or the other end is and all its bytes were received. Reads nothing, waits for nothing."""
        try:
            readable = select.poll()
            readable.register(self._socket, select.POLLIN)
            return bool(readable.poll(0)) and not socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
        except (OSError, ValueError):  # ValueError: this end is closed
            return True

    def close(self) -> None:
        """Close the socket; a thread that waits in it is woken."""
        with contextlib.suppress(OSError):  # the connection has ended already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # an SSLSocket's own would go on in clear
        self._socket.close()

    def _receive_into(self, view: memoryview) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.recv_into(view[:_TLS_BYTES])
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL)

    def _limit(self, option: int, seconds: float) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(min(seconds, _TLS_WAIT_S))  # ssl ignores the kernel's deadlines
            return
        if self._timeouts.get(option) != seconds:
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
            )
            self._timeouts[option] = seconds

    def _broken(self, operation: str, error: OSError) -> LinkBroken:
        self.close()
        why = (
            "the other end did nothing before the deadline"
            if isinstance(error, BlockingIOError | TimeoutError)
            else str(error)
        )
        return LinkBroken(f"{operation}: {why}")
