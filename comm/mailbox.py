"""One inbox for each name: small messages between processes, in order for each sender.

A message that is malformed, foreign or already seen is counted in `refused`, logged and dropped; no part of it is ever executed.

A message to the hub stays in the store until the hub has handled it. So the hub's next process may see a message twice, but misses
none, whatever happens to its sender.

Names are "hub", "relay-0", "actor-0", "rollout-1"; a part of a process may own a sub-inbox such as "relay-0/weights".
"""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from . import threads
from .errors import MessageRefused, StoreGone, WaitTimeout, is_power_of_ten
from .messages.base import Message
from .messages.codec import decode, encode
from .store.client import StoreClient
from .store.protocol import CloseInbox, Confirm, Delivery, OpenInbox, Post, Request

_log = logging.getLogger(__name__)
_CONFIRM_S = 0.1
"""Seconds between two confirmations of the hub."""
_MAX_MESSAGE_BYTES = 4 << 20
HUB = "hub"
"""The inbox whose messages are confirmed."""
Inbox = queue.SimpleQueue[Delivery | None]


class Envelope(NamedTuple):
    """A message as it was received."""

    sender: str
    message: Message


class Mailboxes(ABC):
    """Opens the mailboxes of a process and delivers their messages."""

    gone: Exception | None = None
    """The error with which the store was lost."""

    @abstractmethod
    def open(self, name: str) -> "Mailbox":
        """Open the inbox `name`; one at a time may be open under a name. Earlier messages to it are still there."""

    @abstractmethod
    def put(self, message: Post) -> None:
        """Queue a message for delivery; returns at once."""

    @abstractmethod
    def confirm(self, name: str, place: int) -> None:
        """Confirm that this process has handled the messages of its inbox up to a place; returns at once."""

    @abstractmethod
    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        """Stop receiving under a name. `is_last`: no other process opens it again, so messages to it are dropped."""

    @abstractmethod
    def close(self) -> None:
        """Close every mailbox and deliver the messages sent; closing twice is allowed."""


class Mailbox:
    """One inbox, which one thread reads; any thread may send from it to other inboxes."""

    def __init__(self, name: str, epoch: int, inbox: Inbox, mailboxes: Mailboxes) -> None:
        self.name = name
        self.refused = 0
        self._sequence = epoch << 32  # above all sequence numbers of earlier openings of the name
        self._inbox = inbox
        self._mailboxes = mailboxes
        self._lock = threading.Lock()
        self._closed = False
        self._seen: dict[str, int] = {}
        """The highest sequence number of each sender."""
        self._place = 0
        self._confirmed = 0
        self._confirmed_at = 0.0

    def send(self, to: str, message: Message) -> None:
        """Queue a message for delivery to the inbox `to`; returns at once. Raises `StoreGone` once that is known."""
        if self._mailboxes.gone is not None:
            raise StoreGone(f"{self.name} cannot write to {to}: {self._mailboxes.gone}")
        assert not self._closed, f"{self.name} is closed"
        body = encode(message)
        if len(body) > _MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(body)} bytes to {to}: at most {_MAX_MESSAGE_BYTES} fit"
            )
        with self._lock:
            self._sequence += 1
            self._mailboxes.put(Post(to, self.name, self._sequence, body))

    def receive(self, timeout_s: float) -> Envelope | None:
        """The oldest message not yet received; None after `timeout_s` without one (0 polls). Raises `StoreGone`.

        The hub has handled a message when it asks for the next one.
        """
        if self.name == HUB and threads.seconds() - self._confirmed_at >= _CONFIRM_S:
            self._confirm()
        while not self._closed:
            try:
                delivery = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return None
            if delivery is None:
                self._inbox.put(None)
                if not self._closed:
                    raise StoreGone(f"{self.name} cannot read its messages: {self._mailboxes.gone}")
            elif (envelope := self._opened(delivery)) is not None:
                return envelope
        return None

    def close(self) -> None:
        """Stop receiving for good; the messages sent are still delivered. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._mailboxes.close_inbox(self.name, is_last=True)

    def _opened(self, delivery: Delivery) -> Envelope | None:
        """The message that was delivered; None for one that is refused."""
        self._place = max(self._place, delivery.place)
        try:
            if delivery.sequence <= self._seen.get(delivery.sender, -1):
                raise MessageRefused(f"message {delivery.sequence} of {delivery.sender!r} is a duplicate")
            self._seen[delivery.sender] = delivery.sequence
            return Envelope(delivery.sender, decode(delivery.body))
        except MessageRefused as refusal:
            self.refused += 1
            if is_power_of_ten(self.refused):
                _log.warning("%s drops a message: %s (%d so far)", self.name, refusal, self.refused)
            return None

    def _confirm(self) -> None:
        if self._place > self._confirmed:
            self._mailboxes.confirm(self.name, self._place)
            self._confirmed = self._place
        self._confirmed_at = threads.seconds()


class StoreMailboxes(Mailboxes):
    """Mailboxes in the run's store, over a process's connection to it, which stays open when they are closed."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        store.on_gone = self.on_gone
        self._open: dict[str, Inbox] = {}
        self._lock = threading.Lock()
        self._closed = False

    def open(self, name: str) -> Mailbox:
        with self._lock:
            assert name not in self._open, f"the inbox {name} is open already"
            inbox: Inbox = queue.SimpleQueue()
            self._open[name] = inbox
            self._store.on_delivery[name] = inbox.put
        epoch = self._store.ask(lambda number: OpenInbox(number, name, confirms=name == HUB))
        assert isinstance(epoch, int)
        return Mailbox(name, epoch, inbox, self)

    def put(self, message: Post) -> None:
        self._store.tell(message)

    def confirm(self, name: str, place: int) -> None:
        self._store.tell(Confirm(name, place))

    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        with self._lock:
            inbox = self._open.pop(name, None)
        if inbox is not None or is_last:
            self._store.on_delivery.pop(name, None)
            self._try_to_ask(lambda number: CloseInbox(number, name, is_last))
        if inbox is not None:
            inbox.put(None)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            names = list(self._open)
        for name in names:
            self.close_inbox(name)
        try:
            self._store.sync()
        except (StoreGone, WaitTimeout) as error:
            _log.debug("the store is gone; messages after the last that it confirmed are lost: %s", error)

    def on_gone(self, error: StoreGone) -> None:
        """Tell the readers that the store is gone."""
        self.gone = error
        with self._lock:
            for inbox in self._open.values():
                inbox.put(None)

    def _try_to_ask(self, make: Callable[[int], Request]) -> None:
        try:
            self._store.ask(make)
        except (StoreGone, WaitTimeout) as error:
            _log.debug("closed without the store: %s", error)
