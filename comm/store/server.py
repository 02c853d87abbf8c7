"""The store's server: connections, handshakes and timers around `StoreState`."""

import asyncio
import asyncio.trsock
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable

from ..errors import MessageRefused, is_power_of_ten
from ..frames import FrameReader, encode_message
from ..links.handshake import NONCE_BYTES, PROOF_BYTES, proof_of
from ..links.host import listen
from ..links.tcp import keep_alive
from ..links.tls import TlsIdentity
from ..waits import join_thread
from .protocol import LINK_NAME, MAX_REQUEST_BYTES, PLAIN, REQUESTS, TLS, Push, Request
from .state import StoreState

_log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two checks for silent members."""
TELL_S = 0.02
"""Seconds for which changes of members are collected before they are sent."""
HANDSHAKE_S = 10.0
MOST_STRANGERS = 256
"""Most connections that have not finished the handshake, beside those of the expected members; beyond that the oldest is closed."""
_CLOSE_S = 10.0


class StoreServer:
    """A store in this process, on one interface. It serves from `start` to `close`; its `address` is "host:port"."""

    def __init__(
        self, interface: str, secret: bytes, port: int = 0, tls: TlsIdentity | None = None, num_expected: int = 0
    ) -> None:
        """num_expected: the members that may connect at once."""
        self.state = StoreState()
        """Only the server's thread may read it, until the server is closed."""
        self._listener, self.address = listen(interface, port)
        self._secret = secret
        self._num_expected = num_expected
        self.tls = tls
        self._clients: dict[int, _Connection] = {}
        self._strangers: dict[int, _Connection] = {}
        self._num_clients = 0
        self._num_refused = 0
        self._tells = False
        self._looked_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"store {self.address}", daemon=True)

    def start(self) -> "StoreServer":
        """Serve in a thread; returns the server."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End all connections and the thread; closing twice is allowed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            join_thread(self._thread, _CLOSE_S)
        self._listener.close()

    def _run(self) -> None:
        """Serve clients until `close`."""
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: _Connection(self), sock=self._listener, backlog=4096)
        )
        self._loop.call_later(LOOK_S, self._look)
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for connection in [*self._clients.values(), *self._strangers.values()]:
                connection.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))  # lets the aborted connections end
            self._loop.close()

    def admit(self, connection: "_Connection") -> int:
        """Register a new connection, which has not proved the secret yet; returns its number."""
        self._num_clients += 1
        self._strangers[self._num_clients] = connection
        if len(self._strangers) > MOST_STRANGERS + self._num_expected:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).transport.abort()  # a client's handshake takes milliseconds
        self._loop.call_later(HANDSHAKE_S, self._end_stranger, self._num_clients)
        return self._num_clients

    def accept(self, client: int, connection: "_Connection") -> None:
        """The connection has proved the secret."""
        self._strangers.pop(client, None)
        self._clients[client] = connection

    def handle(self, client: int, requests: Iterable[Request]) -> None:
        """Carry out requests, and send the answers and deliveries that follow from them."""
        now = time.monotonic()
        self.state.hear(client, now)
        for request in requests:
            self.state.handle(client, request, now)
        self._send()

    def refuse(self, error: MessageRefused) -> None:
        """Log that a connection is closed for invalid input: the first, the tenth, the hundredth, and so on."""
        self._num_refused += 1
        if is_power_of_ten(self._num_refused):  # so that repeated attempts cannot fill the disk
            _log.warning("the store closes a connection: %s (%d so far)", error, self._num_refused)

    def forget(self, client: int) -> None:
        """A connection has ended."""
        self._strangers.pop(client, None)
        if self._clients.pop(client, None) is not None:
            self.state.on_closed(client)
            self._send()

    def _end_stranger(self, client: int) -> None:
        if (connection := self._strangers.get(client)) is not None:
            connection.transport.abort()

    def _look(self) -> None:
        now = time.monotonic()
        pause_s = now - self._looked_at - LOOK_S
        self._looked_at = now
        self.state.look(now, pause_s if pause_s > 10 * LOOK_S else 0.0)
        self._send()
        self._loop.call_later(LOOK_S, self._look)

    def _tell(self) -> None:
        self._tells = False
        self.state.tell_changes()
        self._send()

    def _send(self) -> None:
        outgoing = self.state.outgoing
        if outgoing:
            encoded: dict[int, bytes] = {}  # a change goes to many clients and is encoded once
            for client, pushes in outgoing.items():
                if (connection := self._clients.get(client)) is not None:
                    connection.transport.write(b"".join([_encode(push, encoded) for push in pushes]))
            outgoing.clear()
        if self.state.has_changes and not self._tells:
            self._tells = True
            self._loop.call_later(TELL_S, self._tell)

    @property
    def binding(self) -> bytes:
        """The bytes that tie a proof to this server's TLS identity; empty without TLS."""
        return b"" if self.tls is None else self.tls.listening_binding

    def proof(self, end: int, nonce: bytes) -> bytes:
        return proof_of(self._secret, LINK_NAME, end, nonce, self.binding)


def _encode(push: Push, encoded: dict[int, bytes]) -> bytes:
    if id(push) not in encoded:
        encoded[id(push)] = encode_message(push)
    return encoded[id(push)]


class _Connection(asyncio.Protocol):
    """One client's connection: first the handshake as end 0 of a link (`links/handshake.py`), then requests."""

    transport: asyncio.Transport

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._client = 0
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._unproved: bytearray | None = bytearray()
        self._has_answered = False
        self._task: asyncio.Future[None] | None = None
        self._reader = FrameReader(REQUESTS, MAX_REQUEST_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 62)  # so a slow client does not delay the others
        connection = transport.get_extra_info("socket")
        assert isinstance(connection, socket.socket | asyncio.trsock.TransportSocket)
        keep_alive(connection)
        self._client = self._server.admit(self)
        transport.write(PLAIN if self._server.tls is None else TLS)
        if self._server.tls is None:
            transport.write(self._nonce)
        else:
            transport.pause_reading()  # the next bytes belong to the TLS handshake
            self._task = asyncio.ensure_future(self._start_tls(self._server.tls))

    async def _start_tls(self, tls: TlsIdentity) -> None:
        """Encrypt the connection, or close it."""
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                self.transport, self, tls.listening, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
            assert encrypted is not None
            encrypted.set_write_buffer_limits(high=1 << 62)
            self.transport = encrypted
            encrypted.write(self._nonce)
        except OSError as error:
            self._server.refuse(MessageRefused(f"TLS hand-shake: {str(error) or type(error).__name__}"))
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            if self._unproved is not None:
                data = self._prove(data)
            if data:
                self._server.handle(self._client, list(self._reader.feed(data)))
        except MessageRefused as error:
            self._server.refuse(error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self._client)

    def _prove(self, data: bytes) -> bytes:
        """Process bytes of the handshake; returns those after its end. Raises `MessageRefused` for a wrong proof."""
        assert self._unproved is not None
        self._unproved += data
        if not self._has_answered and len(self._unproved) >= NONCE_BYTES:
            self._has_answered = True
            self.transport.write(self._server.proof(0, bytes(self._unproved[:NONCE_BYTES])))
        end = NONCE_BYTES + PROOF_BYTES
        if len(self._unproved) < end:
            return b""
        proof = bytes(self._unproved[NONCE_BYTES:end])
        if not hmac.compare_digest(proof, self._server.proof(1, self._nonce)):
            raise MessageRefused("a client does not know the run's secret")
        rest = bytes(self._unproved[end:])
        self._unproved = None
        self._server.accept(self._client, self)
        return rest
