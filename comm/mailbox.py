"""One inbox per name: small messages between processes, in order per sender, sealed with the run's secret.

A letter is one line of JSON (sender, sequence number, seal), then the message's JSON. The seal is an HMAC-SHA256 over sender,
receiver, sequence number and body. What is malformed, forged, meant for somebody else or already seen is counted in
`refused`, logged with its sender, and dropped: nothing that arrives is ever executed.

Names are "hub", "relay-0", "actor-0", "rollout-1"; a part of a process may own a sub-inbox such as "relay-0/weights".
"""

import hashlib
import hmac
import logging
import queue
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
from torch.distributed import DistError

from .errors import MessageRefused, StoreGone
from .messages import Message, decode, encode
from .store import StoreClient, connect_store

_log = logging.getLogger(__name__)
_MAX_ENVELOPE_BYTES = 4 << 20  # a store takes 8 MiB a value; above that it resets the connection
_FLUSH_S = 10.0


class Envelope(NamedTuple):
    """A message as it was received."""

    sender: str
    message: Message


class Mailbox(Protocol):
    """One inbox and the way out of it."""

    name: str
    refused: int

    def send(self, to: str, message: Message) -> None:
        """Hand a message over for delivery to the inbox `to`; returns at once."""
        ...

    def receive(self, timeout_s: float) -> Envelope | None:
        """The oldest letter not yet received; None if none came within `timeout_s` (0 polls)."""
        ...

    def close(self) -> None:
        """Deliver what was sent, then stop; closing twice is allowed."""
        ...


class Mailboxes(Protocol):
    """Where mailboxes are opened."""

    def open(self, name: str) -> Mailbox:
        """Open the inbox `name`; one at a time may be open under a name."""
        ...

    def close(self) -> None:
        """Close every mailbox opened here."""
        ...


class _Head(msgspec.Struct, frozen=True, array_like=True):
    sender: str
    sequence: int
    signature: str


class MessageSigner:
    """Seals letters and opens them; remembers the highest sequence number seen of each sender."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: dict[tuple[str, str], int] = {}

    def sign(self, sender: str, to: str, sequence: int, message: Message) -> bytes:
        """The bytes of a letter."""
        body = encode(message)
        if len(body) > _MAX_ENVELOPE_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(body)} bytes to {to}: at most {_MAX_ENVELOPE_BYTES} fit"
            )
        head = _Head(sender, sequence, self._signature(sender, to, sequence, body))
        return msgspec.json.encode(head) + b"\n" + body

    def verify(self, to: str, envelope: bytes) -> Envelope:
        """The letter inside the bytes that lay in the inbox `to`; raises `MessageRefused`."""
        line, _, body = envelope.partition(b"\n")
        try:
            head = msgspec.json.decode(line, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageRefused(f"no letter: {error}") from error
        if not hmac.compare_digest(head.signature, self._signature(head.sender, to, head.sequence, body)):
            raise MessageRefused(f"the seal does not fit its sender {head.sender!r}")
        if head.sequence <= self._seen.get((head.sender, to), -1):
            raise MessageRefused(f"letter {head.sequence} of {head.sender!r} was seen before")
        self._seen[head.sender, to] = head.sequence
        return Envelope(head.sender, decode(body))

    def _signature(self, sender: str, to: str, sequence: int, body: bytes) -> str:
        parts = msgspec.json.encode([sender, to, sequence]) + b"\n" + body
        return hmac.new(self._secret, parts, hashlib.sha256).hexdigest()


@dataclass(slots=True)
class _Outgoing:
    to: str
    envelope: bytes


class StoreMailboxes:
    """Mailboxes on the fleet's store: one queue per inbox, one daemon thread that sends, one per inbox that receives."""

    def __init__(self, address: str, secret: bytes, deadline_s: float = 30.0) -> None:
        self._store = connect_store(address, deadline_s)
        self._signer = MessageSigner(secret)
        self._open: dict[str, StoreMailbox] = {}
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._deliver, args=(self._store.clone(),), name="post", daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self.gone: DistError | None = None
        self._sender.start()

    def open(self, name: str) -> "StoreMailbox":
        """Open the inbox `name`; letters that arrived before it was opened are still there."""
        with self._lock:
            assert name not in self._open, f"the inbox {name} is open already"
            epoch = self._store.add(f"post/epoch/{name}", 1)
            self._open[name] = StoreMailbox(self, name, epoch, self._store.clone())
            return self._open[name]

    def close(self) -> None:
        """Close every mailbox, deliver what was sent, and end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            mailboxes = list(self._open.values())
        for mailbox in mailboxes:
            mailbox.close()
        self._outbox.put(None)
        self._sender.join(_FLUSH_S)

    def put(self, to: str, envelope: bytes) -> None:
        """Queue a sealed letter for delivery."""
        self._outbox.put(_Outgoing(to, envelope))

    def close_inbox(self, name: str) -> None:
        """Wake the thread that collects an inbox: an empty letter tells it to look whether it is to end."""
        with self._lock:
            self._open.pop(name, None)
            try:
                self._store.queue_push(f"inbox/{name}", b"")
            except DistError as error:
                _log.debug("%s closes without its store: %s", name, error)

    def verify(self, to: str, envelope: bytes) -> Envelope:
        """Check a letter's seal; raises `MessageRefused`."""
        return self._signer.verify(to, envelope)

    def sign(self, sender: str, to: str, sequence: int, message: Message) -> bytes:
        """The bytes of a letter."""
        return self._signer.sign(sender, to, sequence, message)

    def _deliver(self, store: StoreClient) -> None:
        """Deliver letters in the order they were sent. Waits for the outbox; woken by `put` and `close`."""
        while (outgoing := self._outbox.get()) is not None:
            try:
                store.queue_push(f"inbox/{outgoing.to}", outgoing.envelope)
            except DistError as error:
                self.gone = error
                return
        if self.gone is None:
            _confirm(store)


def _confirm(store: StoreClient) -> None:
    """A round trip: whatever this client pushed before has reached the store once it returns."""
    try:
        store.add("post/flushed", 0)
    except DistError as error:
        _log.debug("the store left before the last letters were confirmed: %s", error)


class StoreMailbox:
    """A mailbox of a `StoreMailboxes`."""

    def __init__(self, mailboxes: StoreMailboxes, name: str, epoch: int, incoming: StoreClient) -> None:
        self.name = name
        self.refused = 0
        self._mailboxes = mailboxes
        self._sequence = epoch << 32  # a later opening of the same name always counts on from above
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._closing = False
        self._gone: DistError | None = None
        self._thread = threading.Thread(target=self._collect, args=(incoming,), name=f"inbox {name}", daemon=True)
        self._thread.start()

    def send(self, to: str, message: Message) -> None:
        """Hand a message over for delivery; returns at once. Raises `StoreGone` once the store is known to be gone."""
        if self._mailboxes.gone is not None:
            raise StoreGone(f"{self.name} cannot write to {to}: {self._mailboxes.gone}")
        assert not self._closing, f"{self.name} is closed"
        with self._lock:
            self._sequence += 1
            self._mailboxes.put(to, self._mailboxes.sign(self.name, to, self._sequence, message))

    def receive(self, timeout_s: float) -> Envelope | None:
        """The oldest letter not yet received, or None after `timeout_s`. Raises `StoreGone`."""
        try:
            letter = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if letter is None:
            self._inbox.put(None)
            if not self._closing:
                raise StoreGone(f"{self.name} cannot read its letters: {self._gone}")
        return letter

    def close(self) -> None:
        """Stop receiving; what was sent is delivered by the post."""
        if self._closing:
            return
        self._closing = True
        self._mailboxes.close_inbox(self.name)
        self._thread.join(_FLUSH_S)

    def _collect(self, store: StoreClient) -> None:
        """Move letters from the store to this process. Waits for the inbox's queue; woken by letters and by `close`."""
        while True:
            try:
                letter = store.queue_pop(f"inbox/{self.name}", True)
            except DistError as error:
                self._gone = error
                break
            if not letter and self._closing:
                break
            try:
                self._inbox.put(self._mailboxes.verify(self.name, letter))
            except MessageRefused as refusal:
                self.refused += 1
                _log.warning("%s refused a letter: %s", self.name, refusal)
        self._inbox.put(None)


class MemoryMailboxes:
    """The twin within one process: the same letters, sealed and opened, in queues of this process."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._inboxes: dict[str, queue.SimpleQueue[bytes]] = defaultdict(queue.SimpleQueue)
        self._epochs: dict[str, int] = defaultdict(int)
        self._lock = threading.RLock()

    def open(self, name: str) -> "MemoryMailbox":
        """Open the inbox `name`."""
        with self._lock:
            self._epochs[name] += 1
            return MemoryMailbox(name, MessageSigner(self._secret), self._epochs[name], self)

    def close(self) -> None:
        """Nothing to end."""

    def inbox(self, name: str) -> "queue.SimpleQueue[bytes]":
        """The raw queue of an inbox."""
        with self._lock:
            return self._inboxes[name]


class MemoryMailbox:
    """A mailbox of a `MemoryMailboxes`."""

    def __init__(self, name: str, signer: MessageSigner, epoch: int, mailboxes: MemoryMailboxes) -> None:
        self.name = name
        self.refused = 0
        self._signer = signer
        self._mailboxes = mailboxes
        self._sequence = epoch << 32
        self._lock = threading.Lock()
        self._inbox = mailboxes.inbox(name)
        self._closed = False

    def send(self, to: str, message: Message) -> None:
        """Put a sealed letter into the inbox `to`."""
        assert not self._closed, f"{self.name} is closed"
        with self._lock:
            self._sequence += 1
            self._mailboxes.inbox(to).put(self._signer.sign(self.name, to, self._sequence, message))

    def receive(self, timeout_s: float) -> Envelope | None:
        """The oldest letter not yet received, or None after `timeout_s`."""
        while not self._closed:
            try:
                letter = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
                return self._signer.verify(self.name, letter)
            except queue.Empty:
                return None
            except MessageRefused as refusal:
                self.refused += 1
                _log.warning("%s refused a letter: %s", self.name, refusal)
        return None

    def close(self) -> None:
        """Stop receiving."""
        self._closed = True
