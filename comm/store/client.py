"""A process's connection to the store."""

import itertools
import logging
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..errors import LinkBroken, MessageRefused, SettingError, StoreGone, WrongSecret
from ..frames import FrameReader, encode_message
from ..links.handshake import authenticate
from ..links.host import join_address, split_address
from ..links.tcp import TcpLink
from ..links.tls import TlsIdentity
from ..waits import Wait, join_thread, waiting
from .protocol import (
    LINK_NAME,
    MAX_REQUEST_BYTES,
    PUSHES,
    TLS,
    AddTo,
    Answer,
    Beat,
    Changed,
    DeleteValue,
    Delivery,
    GetValue,
    Request,
    SetValue,
    Sync,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ATTEMPT_S = 5.0
_RETRY_S = 0.1
_FLUSH_S = 10.0
_PIECE_BYTES = 1 << 18
_POLL_S = 0.5
ANSWER_S = 120.0
"""Deadline of a request that the store answers at once."""


class StoreClient:
    """The connection of one process, from `connect` to `close`. Any thread may use it.

    One thread sends queued requests, and a heartbeat after `heartbeat_s` without one. A second thread receives, and calls the
    callbacks, which must not block.
    """

    def __init__(self, address: str, link: TcpLink, heartbeat_s: float, patience_s: float) -> None:
        """patience_s: seconds of silence after which the store counts as gone."""
        self.address = address
        self.on_delivery: dict[str, Callable[[Delivery], None]] = {}
        """The callback of each inbox."""
        self.on_changed: Callable[[Changed], None] = lambda changed: None
        self.on_gone: Callable[[StoreGone], None] = lambda error: None
        """Called once if the connection ends before `close`."""
        self.gone: StoreGone | None = None
        self._channel = _Channel(link)
        self._heartbeat_s = heartbeat_s
        self._patience_s = patience_s
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Answer | None]] = {}
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send_all, name="store sender", daemon=True),
            threading.Thread(target=self._receive_all, name="store receiver", daemon=True),
        ]

    @staticmethod
    def connect(
        address: str,
        secret: bytes,
        deadline_s: float,
        *,
        tls: TlsIdentity | None = None,
        is_started: bool = True,
        heartbeat_s: float = 1.0,
        patience_s: float = 30.0,
    ) -> "StoreClient":
        """Connect to the store at "host:port". Raises `StoreGone`, or `SettingError` if `address` is malformed.

        tls: this process's identity, which requires an encrypted connection; with None the store decides whether it encrypts.
        is_started: whether the store is known to be running, so that a refused connection means that it has ended. If False, a
            refused connection is tried again until the deadline. A host that does not answer is always tried again.
        """
        try:
            split_address(address)
        except ValueError as error:
            raise SettingError(f"the store's address (HEADRACE_STORE): {error}") from error
        with waiting(f"store {address}", "a connection", deadline_s) as wait:
            while (link := _try_to_connect(address, secret, tls, wait, is_started)) is None:
                time.sleep(min(_RETRY_S, wait.remaining_s))
        client = StoreClient(address, link, heartbeat_s, patience_s)
        for thread in client._threads:
            thread.start()
        return client

    def tell(self, request: Request) -> None:
        """Queue a request that has no answer; returns at once. Raises `StoreGone` once that is known."""
        if self.gone is not None:
            raise StoreGone(str(self.gone))
        self._outbox.put(request)

    def ask(self, make: Callable[[int], Request], deadline_s: float = ANSWER_S) -> int | bytes | None:
        """The answer to the request that `make` builds from a number. Raises `StoreGone`, or `WaitTimeout` past the deadline."""
        number = next(self._numbers)
        answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._answers[number] = answers
        request = make(number)
        try:
            self.tell(request)
            with waiting(f"store {self.address}", type(request).__name__, deadline_s) as wait:
                answer = self._answer(answers, wait)
        finally:
            self._answers.pop(number, None)
        if answer is None:
            raise StoreGone(str(self.gone or f"the store at {self.address} is closed"))
        return answer.value

    def _answer(self, answers: "queue.SimpleQueue[Answer | None]", wait: Wait) -> Answer | None:
        while True:
            try:
                return answers.get(timeout=max(wait.remaining_s, 1e-3))
            except queue.Empty:
                wait.check()

    def set(self, key: str, value: bytes) -> None:
        """Set a value; returns once the store has it. Raises `StoreGone`."""
        self.ask(lambda number: SetValue(number, key, value))

    def get(self, key: str) -> bytes | None:
        """The present value of a key, or None. Raises `StoreGone`."""
        value = self.ask(lambda number: GetValue(number, key))
        assert not isinstance(value, int)
        return value

    def wait_for(self, key: str, deadline_s: float) -> bytes:
        """Wait until a key has a value, and return it. Raises `StoreGone`, or `WaitTimeout` past the deadline."""
        value = self.ask(lambda number: GetValue(number, key, waits=True), deadline_s)
        assert isinstance(value, bytes)
        return value

    def delete(self, key: str) -> None:
        """Drop the value of a key. Raises `StoreGone`."""
        self.ask(lambda number: DeleteValue(number, key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns its new value. Raises `StoreGone`."""
        value = self.ask(lambda number: AddTo(number, key, amount))
        assert isinstance(value, int)
        return value

    def sync(self, deadline_s: float = _FLUSH_S) -> None:
        """Wait until the store has handled every request queued before. Raises `StoreGone` or `WaitTimeout`."""
        self.ask(Sync, deadline_s)

    def close(self) -> None:
        """Send the queued requests and end the connection; closing twice is allowed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._outbox.put(None)
        join_thread(self._threads[0], _FLUSH_S)
        self._channel.close()
        join_thread(self._threads[1], _FLUSH_S)

    def _send_all(self) -> None:
        """Send queued requests, and a heartbeat in each period. Ends with `close`.

        A client that is always sending needs heartbeats too: other requests may have no answer, and the store must not seem silent.
        """
        due_at = time.monotonic() + self._heartbeat_s
        try:
            while True:
                with suppress(queue.Empty):
                    request = self._outbox.get(timeout=max(0.0, due_at - time.monotonic()))
                    if request is None:
                        return
                    self._channel.send(encode_message(request))
                if time.monotonic() >= due_at:
                    self._channel.send(encode_message(Beat()))
                    due_at = time.monotonic() + self._heartbeat_s
        except OSError as error:
            self._lose(f"is gone ({error})")

    def _receive_all(self) -> None:
        """Receive what the store sends, and time its silence. Ends with `close`.

        Time for which this process itself was stopped (a debugger, a frozen container) does not count as silence of the store.
        """
        reader = FrameReader(PUSHES, MAX_REQUEST_BYTES)
        period_s = min(_POLL_S, self._heartbeat_s)
        silent_s = 0.0
        try:
            while silent_s < self._patience_s:
                began = time.monotonic()
                data = self._channel.receive(period_s)
                silent_s = 0.0 if data else silent_s + min(time.monotonic() - began, 2 * period_s)
                for push in reader.feed(data):
                    self._take(push)
            self._lose(f"has not answered for {silent_s:.0f} s")
        except (OSError, MessageRefused) as error:
            self._lose(f"is gone ({error})")

    def _take(self, push: Answer | Beat | Delivery | Changed) -> None:
        match push:
            case Answer(number=number):
                if (answers := self._answers.get(number)) is not None:
                    answers.put(push)
            case Delivery(to=to):
                if (deliver := self.on_delivery.get(to)) is not None:
                    deliver(push)
            case Changed():
                self.on_changed(push)
            case Beat():
                pass

    def _lose(self, how: str) -> None:
        """The connection has ended: wake every thread that waits for an answer."""
        with self._lock:
            is_first = self.gone is None
            if is_first:
                self.gone = StoreGone(f"the run's store at {self.address} {how}")
        for answers in list(self._answers.values()):
            answers.put(None)
        if is_first and not self._closing.is_set():
            assert self.gone is not None
            self.on_gone(self.gone)


def _try_to_connect(
    address: str, secret: bytes, tls: TlsIdentity | None, wait: Wait, is_started: bool
) -> TcpLink | None:
    """An authenticated connection, or None to try again. Raises `StoreGone` past the deadline, or if the store has ended."""
    host, port = split_address(address)
    seconds = min(_ATTEMPT_S, wait.remaining_s + 0.1)
    try:
        link = TcpLink(socket.create_connection((host, port), seconds))
        try:
            return _prove(link, secret, tls, seconds)
        except BaseException:
            link.close()
            raise
    except (OSError, LinkBroken) as error:
        is_final = isinstance(error, WrongSecret) or (is_started and isinstance(error, ConnectionRefusedError))
        if is_final or not wait.remaining_s:
            raise StoreGone(f"no store answers at {join_address(host, port)}: {error}") from error
    return None


def _prove(link: TcpLink, secret: bytes, tls: TlsIdentity | None, seconds: float) -> TcpLink:
    """Do the handshake, encrypted if the store says so. Raises `LinkBroken` or `WrongSecret`."""
    first = bytearray(1)
    link.receive(first, seconds)
    if first == TLS:
        tls = tls or TlsIdentity()
    elif tls is not None:
        raise WrongSecret("the store does not encrypt its connections")
    authenticate(link, LINK_NAME, 1, secret, seconds, tls)
    return link


class _Channel:
    """A connection on which one thread sends and another receives.

    A TLS connection may be used by one thread at a time. So the threads share a lock, and neither blocks while it holds the lock.
    """

    def __init__(self, link: TcpLink) -> None:
        self._link = link
        self._socket = link.release()
        self._socket.settimeout(0.0)
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send all bytes. Raises OSError."""
        view = memoryview(data)
        while view:
            wanted = select.POLLOUT
            try:
                with self._lock:
                    view = view[self._socket.send(view[:_PIECE_BYTES]) :]
                continue
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass
            self._poll(wanted, _POLL_S)

    def receive(self, seconds: float) -> bytes:
        """The bytes that have arrived; empty if none do within `seconds`. Raises OSError, also at the end of the connection."""
        data = self._arrived()
        if data is None:
            self._poll(select.POLLIN, seconds)
            data = self._arrived()
        if data == b"":
            raise ConnectionResetError("closed by the other end")
        return data or b""

    def close(self) -> None:
        """Close the connection and wake both threads."""
        self._link.close()

    def _arrived(self) -> bytes | None:
        try:
            with self._lock:
                return self._socket.recv(_PIECE_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def _poll(self, event: int, seconds: float) -> None:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionResetError("closed by this end")
        ready = select.poll()
        ready.register(descriptor, event)
        ready.poll(seconds * 1000)
