"""The in-memory counterparts of fleet, mailboxes and links: members of one process, threads in the place of processes."""

import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from headrace.comm.errors import LinkBroken
from headrace.comm.fleet import Fleet, Member, member_name, sorted_members
from headrace.comm.links.base import Link
from headrace.comm.mailbox import HUB, Inbox, Mailbox, Mailboxes
from headrace.comm.recipe import CommSettings
from headrace.comm.store.inbox import StoredInbox
from headrace.comm.store.protocol import Post
from headrace.comm.waits import waiting

_PIPE_BYTES = 64 << 20


class MemoryMailboxes(Mailboxes):
    """The inboxes of the store, in this process."""

    def __init__(self) -> None:
        self._stored: dict[str, StoredInbox] = {}
        self._readers: dict[str, Inbox] = {}
        self._lock = threading.Lock()

    def open(self, name: str) -> Mailbox:
        with self._lock:
            inbox: Inbox = queue.SimpleQueue()
            stored = self._inbox(name)
            for delivery in stored.open(confirms=name == HUB):
                inbox.put(delivery)
            self._readers[name] = inbox
            return Mailbox(name, stored.num_opened, inbox, self)

    def put(self, message: Post) -> None:
        with self._lock:
            if (delivery := self._inbox(message.to).add(message.sender, message.sequence, message.body)) is not None:
                self._readers[message.to].put(delivery)

    def confirm(self, name: str, place: int) -> None:
        with self._lock:
            self._inbox(name).confirm(place)

    def forget(self, sender: str) -> None:
        """A process died before its last messages to the hub had left it."""
        with self._lock:
            stored = self._inbox(HUB)
            stored._kept = deque(message for message in stored._kept if message.sender != sender)

    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        with self._lock:
            self._inbox(name).close(is_last=is_last)

    def _inbox(self, name: str) -> StoredInbox:
        return self._stored.setdefault(name, StoredInbox(name))

    def close(self) -> None:
        """Nothing to end."""


class _Pipe:
    """Bytes on their way in one direction of a memory link."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.pieces: deque[np.ndarray] = deque()
        self.num_bytes = 0
        self.closed = False

    def wait(self, until: float, operation: str) -> None:
        """Wait for a change, at most until a moment of the monotonic clock; then raises `LinkBroken`."""
        if not self.changed.wait(until - time.monotonic()):
            raise LinkBroken(f"{operation}: the other end did nothing before the deadline")


class MemoryLink:
    """A link within one process. The pieces need not match; `send` waits while more than 64 MiB are under way."""

    backend = "memory"

    def __init__(self, out: _Pipe, into: _Pipe) -> None:
        self._out = out
        self._into = into

    @staticmethod
    def pair() -> "tuple[MemoryLink, MemoryLink]":
        """Both ends of a new link."""
        there, back = _Pipe(), _Pipe()
        return MemoryLink(there, back), MemoryLink(back, there)

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        pipe, until = self._out, time.monotonic() + deadline_s
        with pipe.changed:
            while pipe.num_bytes > _PIPE_BYTES and not pipe.closed:
                pipe.wait(until, "send")
            if pipe.closed:
                raise LinkBroken("send: the link is closed")
            pipe.pieces.append(buffer.copy())
            pipe.num_bytes += buffer.nbytes
            pipe.changed.notify_all()

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        pipe, until, filled = self._into, time.monotonic() + deadline_s, 0
        with pipe.changed:
            while filled < buffer.nbytes:
                if not pipe.pieces:
                    if pipe.closed:
                        raise LinkBroken(f"receive: the link is closed after {filled} of {buffer.nbytes} bytes")
                    pipe.wait(until, "receive")
                    continue
                piece = pipe.pieces.popleft()
                taken = min(piece.nbytes, buffer.nbytes - filled)
                buffer[filled : filled + taken] = piece[:taken]
                if taken < piece.nbytes:
                    pipe.pieces.appendleft(piece[taken:])
                filled += taken
                pipe.num_bytes -= taken
                pipe.changed.notify_all()

    def close(self) -> None:
        """End both directions; bytes sent before can still be received."""
        for pipe in (self._out, self._into):
            with pipe.changed:
                pipe.closed = True
                pipe.changed.notify_all()


class MemoryNetwork:
    """State that the members share in the place of a store: mailboxes, members, and link ends that wait for their other."""

    def __init__(self) -> None:
        self.mailboxes = MemoryMailboxes()
        self.lock = threading.Condition()
        self.run_id = secrets.token_hex(8)
        self.members: dict[str, Member] = {}
        self.incarnations: dict[str, int] = {}
        self.link_ends: dict[str, Link] = {}
        self.store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


class MemoryFleet(Fleet):
    """One member of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, me: Member, settings: CommSettings) -> None:
        super().__init__(me, network.mailboxes, settings)
        self.network = network

    @staticmethod
    def join_network(
        network: MemoryNetwork,
        role: str,
        index: int = 0,
        info: Mapping[str, str] | None = None,
        settings: CommSettings | None = None,
        host: str = "here",
    ) -> "MemoryFleet":
        """Join the network."""
        name = member_name(role, index)
        with network.lock:
            incarnation = network.incarnations[name] = network.incarnations.get(name, 0) + 1
            me = Member(name, role, index, incarnation, host, os.getpid(), dict(info or {}))
            network.members[name] = me
        return MemoryFleet(network, me, settings or CommSettings())

    @property
    def run_id(self) -> str:
        return self.network.run_id

    def members(self, role: str | None = None) -> list[Member]:
        with self.network.lock:
            return sorted_members(self.network.members.values(), role)

    def announce(self, **info: str) -> None:
        with self.network.lock:
            self.me = msgspec.structs.replace(self.me, info={**self.me.info, **info})
            self.network.members[self.name] = self.me

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        """One end of a link in memory, whatever the back end asked for."""
        ends = self.network.link_ends
        with waiting(f"link {name}", f"end {1 - end}", deadline_s) as wait, self.network.lock:
            mine = f"{name}/{end}"
            if mine not in ends:
                ends[f"{name}/0"], ends[f"{name}/1"] = MemoryLink.pair()
            ends[f"{mine}/taken"] = ends[mine]
            self.network.lock.notify_all()
            while f"{name}/{1 - end}/taken" not in ends:
                wait.check()
                self.network.lock.wait(wait.remaining_s)
            return ends[mine]

    def open_group(
        self, name: str, rank: int, size: int, backend: str, deadline_s: float, timeout: timedelta
    ) -> dist.ProcessGroup:
        """A group of its own for each rank, since the ranks are threads of one process."""
        store = dist.PrefixStore(name, self.network.store)  # pyright: ignore[reportPrivateImportUsage]
        group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        return group

    def crash(self) -> None:
        """Simulate a crash: the member counts as dead without having left."""
        with self.network.lock:
            self.network.members[self.name] = msgspec.structs.replace(self.me, is_alive=False)

    def leave(self) -> None:
        with self.network.lock:
            if self.network.members.get(self.name, self.me).incarnation == self.incarnation:
                self.network.members.pop(self.name, None)
