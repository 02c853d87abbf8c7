"""A test registers everything that it starts; `tests/conftest.py` closes it after the test, passed or failed."""

import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

_started = ExitStack()


def at_end(close: Callable[[], object]) -> None:
    """Call `close` after the test, the last one first. A thing that the test closes itself must allow a second close.

    A store of this process must live until its members have left: give a function that holds a reference to it.
    """
    _started.callback(close)


def close_all() -> None:
    """Close everything, even if a close fails; raises the last failure."""
    _started.close()


def hang_up(connection: socket.socket) -> None:
    """Close a connection whose threads may wait in `recv`: a close alone neither wakes them nor tells the other end."""
    with suppress(OSError):  # it has ended already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    socket.socket.close(connection)
