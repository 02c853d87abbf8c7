"""Links over plain TCP sockets. A socket reports a dead neighbour sooner than any other back end."""

import contextlib
import socket
import struct

import numpy as np

from ..errors import LinkBroken
from .seal import Seal

_UNANSWERED_MS = 20_000
"""Milliseconds after which a connection breaks whose bytes the other host does not take: it is cut off."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5))


class TcpLink:
    """One end of a TCP connection."""

    backend = "tcp"

    def __init__(self, connection: socket.socket) -> None:
        self.seal: Seal | None = None
        self._socket = connection
        self._timeouts: dict[int, float] = {}
        # The kernel keeps the deadlines: it then moves a whole buffer in one call, without a poll for every segment.
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        try:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            self._socket.sendall(buffer.data)
        except OSError as error:
            raise self._broken("send", error) from error

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        view = buffer.data
        try:
            self._limit(socket.SO_RCVTIMEO, deadline_s)
            while view:
                if not (num_bytes := self._socket.recv_into(view, 0, socket.MSG_WAITALL)):
                    raise ConnectionResetError("closed by the other end")
                view = view[num_bytes:]
        except OSError as error:
            raise self._broken("receive", error) from error

    def is_closed(self) -> bool:
        """Whether this end is closed, or the other end is and all its bytes were received. Reads nothing, waits for nothing."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the socket; a thread that waits in it is woken."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        if self._timeouts.get(option) != seconds:
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
            )
            self._timeouts[option] = seconds

    def _broken(self, operation: str, error: OSError) -> LinkBroken:
        self.close()
        why = "the other end did nothing before the deadline" if isinstance(error, BlockingIOError) else str(error)
        return LinkBroken(f"{operation}: {why}")
