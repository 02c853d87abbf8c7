"""One inbox for each name: small messages between processes, in order for each sender, signed with the run's secret.

An envelope (`signing.py`) that is malformed, forged, addressed to another inbox or already
seen is counted in `refused`, logged and dropped; no part of it is ever executed.

A message to the hub stays with its sender until the hub has handled it. When the hub's process is started again, it has an
inbox of its own, and each sender sends it what is unconfirmed, in order: so the hub may see a message twice, but misses none.

Names are "hub", "relay-0", "actor-0", "rollout-1"; a part of a process may own a sub-inbox such as "relay-0/weights".
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.distributed import DistError

from . import threads
from .errors import MessageRefused, StoreGone, is_power_of_ten
from .messages.base import Message
from .signing import EntryReader, Envelope, MessageSigner, sign_entry
from .store import StoreClient, clone_store
from .waits import join_thread

_log = logging.getLogger(__name__)
_FLUSH_S = 10.0
UNCONFIRMED_S = 15.0
"""Longest wait of a process that leaves for a hub that does not confirm its last messages."""
_IDLE_S = 60.0
_CONFIRM_S = 0.1
"""Seconds between two confirmations of the hub."""
_LOOK_S = 0.3
"""Seconds after which a sender with unconfirmed messages looks for a confirmation."""
HUB = "hub"
"""The inbox whose messages are confirmed."""
_Inbox = queue.SimpleQueue[bytes | None]


class Outgoing(NamedTuple):
    """A message on its way, signed; the sequence numbers of a sender grow."""

    sender: str
    sequence: int
    to: str
    envelope: bytes


class Unconfirmed:
    """Messages to the hub that it has not confirmed, in the order in which they were sent."""

    def __init__(self) -> None:
        self._messages: deque[Outgoing] = deque()

    def __iter__(self) -> Iterator[Outgoing]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Outgoing) -> None:
        self._messages.append(message)

    def senders(self) -> list[str]:
        """The inboxes that sent them."""
        return list(dict.fromkeys(message.sender for message in self._messages))

    def confirm(self, handled: Mapping[str, int]) -> None:
        """Forget the messages up to a sequence number of each sender."""
        self._messages = deque(m for m in self._messages if m.sequence > handled.get(m.sender, -1))

    def clear(self) -> None:
        self._messages.clear()


class Mailboxes(ABC):
    """Opens the mailboxes of a process and delivers their messages."""

    def __init__(self, secret: bytes, encrypts: bool = False) -> None:
        self.secret = secret
        self.signer = MessageSigner(secret, encrypts)
        self.gone: DistError | None = None
        """The error by which the store was found gone."""

    @abstractmethod
    def open(self, name: str) -> "Mailbox":
        """Open the inbox `name`; one at a time may be open under a name. Earlier messages to it are still there."""

    @abstractmethod
    def put(self, message: Outgoing) -> None:
        """Queue a message for delivery; returns at once."""

    @abstractmethod
    def confirm(self, handled: Mapping[str, int]) -> None:
        """Tell each sender up to which sequence number the hub, in this process, has handled its messages; returns at once."""

    @abstractmethod
    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        """Stop receiving under a name. `is_last`: no other process opens it again, so messages to it need no confirmation."""

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
        self._confirmed: dict[str, int] = {}
        self._confirmed_at = 0.0

    def send(self, to: str, message: Message) -> None:
        """Queue a message for delivery to the inbox `to`; returns at once. Raises `StoreGone` once that is known."""
        if self._mailboxes.gone is not None:
            raise StoreGone(f"{self.name} cannot write to {to}: {self._mailboxes.gone}")
        assert not self._closed, f"{self.name} is closed"
        with self._lock:
            self._sequence += 1
            envelope = self._mailboxes.signer.sign(self.name, to, self._sequence, message)
            self._mailboxes.put(Outgoing(self.name, self._sequence, to, envelope))

    def receive(self, timeout_s: float) -> Envelope | None:
        """The oldest message not yet received; None after `timeout_s` without one (0 polls). Raises `StoreGone`.

        The hub has handled a message when it asks for the next one.
        """
        if self.name == HUB and threads.seconds() - self._confirmed_at >= _CONFIRM_S:
            self._confirm()
        while not self._closed:
            try:
                envelope = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
                if envelope is not None:
                    return self._mailboxes.signer.verify(self.name, envelope)
            except queue.Empty:
                return None
            except MessageRefused as refusal:
                self.refused += 1
                if is_power_of_ten(self.refused):  # a stranger who sends many would fill the disk with their lines
                    _log.warning("%s drops a message: %s (%d so far)", self.name, refusal, self.refused)
                continue
            self._inbox.put(None)
            if not self._closed:
                raise StoreGone(f"{self.name} cannot read its messages: {self._mailboxes.gone}")
        return None

    def close(self) -> None:
        """Stop receiving for good; the messages sent are still delivered. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._mailboxes.close_inbox(self.name, is_last=True)

    def _confirm(self) -> None:
        seen = self._mailboxes.signer.seen(self.name)
        fresh = {sender: sequence for sender, sequence in seen.items() if self._confirmed.get(sender) != sequence}
        if fresh:
            self._mailboxes.confirm(fresh)
        self._confirmed = seen
        self._confirmed_at = threads.seconds()


class StoreMailboxes(Mailboxes):
    """Mailboxes on the fleet's store: one queue per inbox, one thread that sends, and one per open inbox that receives.

    `store` is a client for this object alone.
    """

    def __init__(self, store: StoreClient, secret: bytes, encrypts: bool = False) -> None:
        super().__init__(secret, encrypts)
        self._store = store
        self._open: dict[str, tuple[str, threading.Thread]] = {}
        self._outbox: queue.SimpleQueue[Outgoing | Mapping[str, int] | None] = queue.SimpleQueue()
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
            epoch = self._store.add(_epoch_key(name), 1)
            if name == HUB:
                epoch = self._announce_hub(epoch)
            key = _inbox_key(name, epoch)
            thread = threading.Thread(
                target=self._collect,
                args=(name, key, inbox, clone_store(self._store)),
                name=f"inbox {name}",
                daemon=True,
            )
            self._open[name] = key, thread
            thread.start()
        return Mailbox(name, epoch, inbox, self)

    def _announce_hub(self, epoch: int) -> int:
        """Tell the senders the number of the hub's new inbox, which is above all before; returns it."""
        before = EntryReader(self.secret, HUB).read_number(_HUB_KEY, self._store.compare_set(_HUB_KEY, "", ""))
        epoch = max(epoch, (before or 0) + 1)
        self._store.set(_HUB_KEY, sign_entry(self.secret, _HUB_KEY, str(epoch).encode()))
        return epoch

    def put(self, message: Outgoing) -> None:
        self._outbox.put(message)

    def confirm(self, handled: Mapping[str, int]) -> None:
        """The confirmation follows all messages sent so far: the answers to those that are confirmed."""
        self._outbox.put(handled)

    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        with self._lock:
            key, thread = self._open.pop(name, ("", None))
            try:
                if thread is not None:  # an empty value wakes it, and it finds its inbox closed
                    self._store.queue_push(key, b"")
                if name == HUB and is_last:
                    self._store.set(_CLOSED_KEY, sign_entry(self.secret, _CLOSED_KEY, b"1"))
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
        join_thread(self._sender, _FLUSH_S + UNCONFIRMED_S)

    def _deliver(self, store: StoreClient) -> None:
        """Deliver messages in the order they were sent. Waits for the outbox and the hub; woken by `put` and `close`."""
        delivery = _Delivery(store, self.secret)
        try:
            while True:
                with suppress(queue.Empty):
                    match self._outbox.get(timeout=_LOOK_S if delivery.unconfirmed else _IDLE_S):
                        case None:
                            break
                        case Outgoing() as message:
                            delivery.send(message)
                        case handled:
                            delivery.confirm(handled)
                delivery.look_at_times()
            delivery.finish(UNCONFIRMED_S)
        except DistError as error:
            self.gone = error
            _log.debug("the store is gone; messages after the last that it confirmed are lost: %s", error)

    def _collect(self, name: str, key: str, inbox: _Inbox, store: StoreClient) -> None:
        """Move envelopes from the store to this process. Waits for the store's queue; woken by messages and `close_inbox`."""
        try:
            while (envelope := store.queue_pop(key, True)) or name in self._open:
                inbox.put(envelope)
        except DistError as error:
            self.gone = error
        inbox.put(None)


class _Delivery:
    """The sending end of a process's mailboxes, for one thread."""

    def __init__(self, store: StoreClient, secret: bytes) -> None:
        self.unconfirmed = Unconfirmed()
        self._store = store
        self._secret = secret
        self._entries = EntryReader(secret, "a sender of messages")
        self._hub = 1  # messages may be sent before the first hub has opened its inbox
        self._handled_keys: dict[str, str] = {}
        self._looked_at = 0.0

    def send(self, message: Outgoing) -> None:
        if message.to == HUB:
            self.unconfirmed.add(message)
        self._push(message)

    def confirm(self, handled: Mapping[str, int]) -> None:
        """Confirm the messages of other processes, for the hub in this one."""
        for sender, sequence in handled.items():
            key = _handled_key(sender)
            self._store.set(key, sign_entry(self._secret, key, str(sequence).encode()))

    def look_at_times(self) -> None:
        if self.unconfirmed and time.monotonic() - self._looked_at >= _LOOK_S:
            self._look()

    def finish(self, deadline_s: float) -> None:
        """Wait until the store has everything, and until the hub has handled its part, if there is or was a hub."""
        self._store.check([_HUB_KEY])  # a round trip: the store has everything that was pushed before
        until = time.monotonic() + deadline_s
        while self.unconfirmed and self._look() and time.monotonic() < until:
            time.sleep(_CONFIRM_S / 4)

    def _push(self, message: Outgoing) -> None:
        self._store.queue_push(_inbox_key(message.to, self._hub), message.envelope)

    def _look(self) -> bool:
        """Forget what the hub has handled; send the rest again if another process is the hub now. False without any hub."""
        self._looked_at = time.monotonic()
        for sender in self.unconfirmed.senders():
            if sender not in self._handled_keys:
                self._handled_keys[sender] = _handled_key(sender)
                for key in (self._handled_keys[sender], _HUB_KEY, _CLOSED_KEY):
                    self._store.compare_set(key, "", "")  # a read of keys that are not there would wait for them
        keys = [_HUB_KEY, _CLOSED_KEY, *self._handled_keys.values()]
        values = zip(keys, self._store.multi_get(keys), strict=True)
        hub, is_closed, *handled = (self._entries.read_number(key, value) or 0 for key, value in values)
        self.unconfirmed.confirm(dict(zip(self._handled_keys, handled, strict=True)))
        if is_closed:
            self.unconfirmed.clear()
        if hub > self._hub:
            self._hub = hub
            for message in self.unconfirmed:
                self._push(message)
        return hub > 0


def _epoch_key(name: str) -> str:
    return f"mailbox/epoch/{name}"


def _inbox_key(name: str, epoch: int) -> str:
    """The queue of an inbox; each process of the hub has its own, so that none reads what another one left over."""
    return f"inbox/{name}#{epoch}" if name == HUB else f"inbox/{name}"


def _handled_key(sender: str) -> str:
    return f"mailbox/handled/{sender}"


_HUB_KEY = "mailbox/hub"
"""Key with the number of the hub's inbox. It is signed, as are the next one and `_handled_key`: any client can write there."""
_CLOSED_KEY = "mailbox/closed"
"""Key that is 1 when the hub has closed its inbox for good."""
