"""The thread that speaks HTTP: one event loop with uvicorn."""

import asyncio
import logging
import socket
import threading

import uvicorn
from starlette.applications import Starlette

from ...comm.errors import HeadraceError, SettingError
from .connections import BoundedConnection

IDLE_S = 30
"""Seconds after which a connection without a request is closed."""
_END_S = 2
"""Seconds that answers under way have to end when the server does."""
_START_S = 30.0
_BACKLOG = 512


def listen(host: str, port: int, setting: str = "") -> socket.socket:
    """A socket that listens. port: 0 takes a free one. Raises `SettingError` for one that is taken, and for a host of another machine.

    setting: that of a recipe which gives both; empty for options of a command.
    """
    named = f"{setting}={host}:{port}" if setting else f"--host={host} --port={port}"
    if not 0 <= port < 1 << 16:
        raise SettingError(f"{named}: {port} is not a port")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise SettingError(f"{named}: {error.strerror}") from error
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        free = "port 0 takes a free one" if setting else "--port=0 takes a free port"
        raise SettingError(f"{named}: {error.strerror}; {free}") from error
    return opened


class HttpThread:
    """Serves an application on a socket, which it closes at its end."""

    def __init__(self, app: Starlette, opened: socket.socket) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # clients' mistakes, as many as they like
        config = uvicorn.Config(
            app, http=BoundedConnection, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, backlog=_BACKLOG, timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=_END_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._socket = opened
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._socket.getsockname()[1]

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def check(self) -> None:
        """Raise if the thread has ended, though nobody has closed it."""
        if not self._thread.is_alive():
            raise HeadraceError("the thread of the HTTP server has ended") from self._failure

    def close(self) -> None:
        """Refuse new connections, end those that are open, and wait for the thread."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_START_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:  # noqa: BLE001 - `check` raises it in the main thread
            self._failure = error
