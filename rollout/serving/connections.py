"""Connections with limits that uvicorn's own do not have: on the time of the headers, on a client that does not read, on their number."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 15.0
"""Longest time from the first byte of a request, or from the beginning of a connection, to the end of the headers."""
UNREAD_S = 60.0
"""Longest time in which a client reads nothing of what waits for it."""
MOST_CONNECTIONS = 400
"""Connections beyond this many close those that have been idle for longest."""


class BoundedConnection(H11Protocol):
    """One connection."""

    _headers_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._await_headers()
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_busy:
            _cancel(self._headers_timer)
            self._headers_timer = None
        elif self._headers_timer is None and not self.transport.is_closing():
            self._await_headers()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread_timer)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it would wait for a client that does not read
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._headers_timer)
        super().connection_lost(exc)
        _cancel(self._unread_timer)
        self._unset_keepalive_if_required()  # uvicorn leaves its timer after an error

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest; one that is closing already makes its own room."""
        here = [each for each in self.connections if isinstance(each, BoundedConnection)]
        open_ones = [each for each in here if not each.transport.is_closing()]
        if len(open_ones) > MOST_CONNECTIONS:
            idle = [each for each in open_ones if not each.is_busy]
            min(idle, key=lambda each: each._idle_since).transport.abort()

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
