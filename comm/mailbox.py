"""One inbox for each name: small messages between processes, in order for each sender, signed with the run's secret.

An envelope (`signing.py`) that is malformed, forged, addressed to another inbox or already
seen is counted in `refused`, logged and dropped; no part of it is ever executed.

Names are "hub", "relay-0", "actor-0", "rollout-1"; a part of a process may own a sub-inbox such as "relay-0/weights".
"""

import logging
import queue
import threading
from abc import ABC, abstractmethod

from torch.distributed import DistError

from .errors import MessageRefused, StoreGone
from .messages.base import Message
from .signing import Envelope, MessageSigner
from .store import StoreClient, clone_store
from .waits import join_thread

_log = logging.getLogger(__name__)
_FLUSH_S = 10.0
_IDLE_S = 60.0
_Inbox = queue.SimpleQueue[bytes | None]


class Mailboxes(ABC):
    """Opens the mailboxes of a process and delivers their messages."""

    def __init__(self, secret: bytes) -> None:
        self.signer = MessageSigner(secret)
        self.gone: DistError | None = None
        """The error by which the store was found gone."""

    @abstractmethod
    def open(self, name: str) -> "Mailbox":
        """Open the inbox `name`; one at a time may be open under a name. Earlier messages to it are still there."""

    @abstractmethod
    def put(self, to: str, envelope: bytes) -> None:
        """Queue an envelope for delivery; returns at once."""

    @abstractmethod
    def close_inbox(self, name: str) -> None:
        """Stop receiving under a name."""

    @abstractmethod
    def close(self) -> None:
        """Close every mailbox and deliver the messages sent; closing twice is allowed."""


class Mailbox:
    """One inbox, and the way to all others. Any thread may send, one receives."""

    def __init__(self, name: str, epoch: int, inbox: _Inbox, mailboxes: Mailboxes) -> None:
        self.name = name
        self.refused = 0
        self._sequence = epoch << 32  # above all sequence numbers of earlier openings of the name
        self._inbox = inbox
        self._mailboxes = mailboxes
        self._lock = threading.Lock()
        self._closed = False

    def send(self, to: str, message: Message) -> None:
        """Queue a message for delivery to the inbox `to`; returns at once. Raises `StoreGone` once that is known."""
        if self._mailboxes.gone is not None:
            raise StoreGone(f"{self.name} cannot write to {to}: {self._mailboxes.gone}")
        assert not self._closed, f"{self.name} is closed"
        with self._lock:
            self._sequence += 1
            self._mailboxes.put(to, self._mailboxes.signer.sign(self.name, to, self._sequence, message))

    def receive(self, timeout_s: float) -> Envelope | None:
        """The oldest message not yet received; None after `timeout_s` without one (0 polls). Raises `StoreGone`."""
        while not self._closed:
            try:
                envelope = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
                if envelope is not None:
                    return self._mailboxes.signer.verify(self.name, envelope)
            except queue.Empty:
                return None
            except MessageRefused as refusal:
                self.refused += 1
                _log.warning("%s drops a message: %s", self.name, refusal)
                continue
            self._inbox.put(None)
            if not self._closed:
                raise StoreGone(f"{self.name} cannot read its messages: {self._mailboxes.gone}")
        return None

    def close(self) -> None:
        """Stop receiving; the messages sent are still delivered. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._mailboxes.close_inbox(self.name)


class StoreMailboxes(Mailboxes):
    """Mailboxes on the fleet's store: one queue per inbox, one thread that sends, and one per open inbox that receives.

    `store` is a client for this object alone.
    """

    def __init__(self, store: StoreClient, secret: bytes) -> None:
        super().__init__(secret)
        self._store = store
        self._open: dict[str, threading.Thread] = {}
        self._outbox: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(
            target=self._deliver, args=(clone_store(store),), name="mailbox sender", daemon=True
        )
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> "StoreMailboxes":
        """Start to deliver; returns itself."""
        self._sender.start()
        return self

    def open(self, name: str) -> Mailbox:
        inbox: _Inbox = queue.SimpleQueue()
        with self._lock:
            assert name not in self._open, f"the inbox {name} is open already"
            epoch = self._store.add(f"mailbox/epoch/{name}", 1)
            thread = self._open[name] = threading.Thread(
                target=self._collect, args=(name, inbox, clone_store(self._store)), name=f"inbox {name}", daemon=True
            )
            thread.start()
        return Mailbox(name, epoch, inbox, self)

    def put(self, to: str, envelope: bytes) -> None:
        self._outbox.put((to, envelope))

    def close_inbox(self, name: str) -> None:
        with self._lock:
            thread = self._open.pop(name, None)
            try:  # an empty value wakes the thread, which finds its inbox closed
                self._store.queue_push(f"inbox/{name}", b"")
            except DistError as error:
                _log.debug("%s closes without its store: %s", name, error)
        if thread is not None:
            join_thread(thread, _FLUSH_S)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            names = list(self._open)
        for name in names:
            self.close_inbox(name)
        self._outbox.put(None)
        join_thread(self._sender, _FLUSH_S)

    def _deliver(self, store: StoreClient) -> None:
        """Deliver messages in the order they were sent. Waits for the outbox; woken by `put` and `close`."""
        try:
            while True:
                try:
                    outgoing = self._outbox.get(timeout=_IDLE_S)
                except queue.Empty:
                    continue
                if outgoing is None:
                    store.add("mailbox/flushed", 0)  # a round trip: the store has everything that was pushed before
                    return
                store.queue_push(f"inbox/{outgoing[0]}", outgoing[1])
        except DistError as error:
            self.gone = error
            _log.debug("the store is gone; messages after the last that it confirmed are lost: %s", error)

    def _collect(self, name: str, inbox: _Inbox, store: StoreClient) -> None:
        """Move envelopes from the store to this process. Waits for the store's queue; woken by messages and `close_inbox`."""
        try:
            while (envelope := store.queue_pop(f"inbox/{name}", True)) or name in self._open:
                inbox.put(envelope)
        except DistError as error:
            self.gone = error
        inbox.put(None)
