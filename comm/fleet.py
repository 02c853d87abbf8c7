"""Membership: the processes of a run, their incarnations and their heartbeats.

Each process joins under its role and index and increments a counter on the fleet's store. Each keeps its own table of all
members, which a thread refreshes every heartbeat; queries read that table and never the store. A member whose counter has
not changed for `comm.expiry_s`, by the reader's own clock, counts as dead until it beats or joins again.

A process without its store receives no message, so its watchdog ends it with a named error. A run that ends in order leaves
the fleet before the store ends.
"""

import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import DistError

from . import threads
from .environment import RUN_ID
from .errors import STORE_LOST_EXIT, SettingError, StoreGone
from .links.base import Link
from .links.host import bind_process_groups, host_id, own_address
from .links.opening import open_link
from .links.tls import TlsIdentity
from .mailbox import Mailbox, Mailboxes, StoreMailboxes
from .recipe import CommSettings
from .signing import EntryReader, derive_key, sign_entry
from .storage.client import StorageClient
from .storage.server import StorageServer
from .store import ROSTER, StoreClient, clone_store, connect_store
from .waits import Wait, join_thread, waiting

_LEAVE_S = 5.0


class Member(msgspec.Struct, frozen=True):
    """One member as another one sees it; `info` are the facts that it announced, `host` is the identity of its host
    (`comm.links.host`), and `host_name` is for messages.
    """

    name: str
    role: str
    index: int
    incarnation: int
    host: str
    pid: int
    info: dict[str, str]
    is_alive: bool = True
    host_name: str = ""


TRAINS_AGAIN = "trains again"
"""A fact about an actor, "yes" while it trains steps again before its first version; "" after that."""


def member_name(role: str, index: int) -> str:
    """ "rollout-1"; the one hub is just "hub"."""
    return role if role == "hub" else f"{role}-{index}"


class Fleet(ABC):
    """One member's view of the run. `Fleet.join` joins over the store; tests have a counterpart in one process."""

    def __init__(
        self, me: Member, mailboxes: Mailboxes, settings: CommSettings, secret: bytes = b"", address: str = "127.0.0.1"
    ) -> None:
        self.me = me
        self.address = address
        """The address of this host on which this member listens."""
        self.name = me.name
        self.incarnation = me.incarnation
        self.mailboxes = mailboxes
        self.settings = settings
        self._secret = secret
        self._tls = TlsIdentity() if settings.tls else None

    @staticmethod
    def join(
        store_address: str, role: str, index: int, secret: bytes, info: Mapping[str, str], settings: CommSettings
    ) -> "StoreFleet":
        """Join the run whose store is at `store_address`; raises `StoreGone`."""
        return StoreFleet(store_address, role, index, secret, info, settings).start()

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The same for a process of a run however often it is started again; a run that is resumed has another."""

    @abstractmethod
    def members(self, role: str | None = None) -> list[Member]:
        """All members that ever joined and have not left, or those of one role, by role and index."""

    @abstractmethod
    def announce(self, **info: str) -> None:
        """Add facts about this member; the others see them within a heartbeat."""

    @abstractmethod
    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        """One end (0 or 1) of the link `name`, once the other end is open too. Raises `LinkBroken` or `WaitTimeout`."""

    @abstractmethod
    def open_group(
        self, name: str, rank: int, size: int, backend: str, deadline_s: float, timeout: timedelta
    ) -> dist.ProcessGroup:
        """The process group `name` of this role's ranks; `timeout` bounds each of its collectives. Raises `StoreGone`."""

    @abstractmethod
    def leave(self) -> None:
        """Deliver what was sent, leave the fleet and end its threads; leaving twice is allowed."""

    def keep_waiting(self, wait: Wait) -> None:
        """Restart the time of a wait for the first version while an actor trains steps again. That may take hours; the actor tells its progress."""
        if any(actor.info.get(TRAINS_AGAIN) for actor in self.alive_members("actor")):
            wait.since = threads.seconds()

    def open_mailbox(self, name: str) -> Mailbox:
        """The inbox `name` of this process; one at a time may be open under a name."""
        return self.mailboxes.open(name)

    def host_rows(self, on_client_lost: Callable[[str, int], None] = lambda member, incarnation: None) -> StorageServer:
        """A storage unit in this process, open to every process of the run."""
        return StorageServer(self.address, self._secret, on_client_lost=on_client_lost, tls=self._tls).start()

    def open_rows(self, address: str) -> StorageClient:
        """A client of the unit at an address; raises `PeerGone`."""
        me = {"member": self.name, "incarnation": self.incarnation, "tls": self._tls}
        return StorageClient(address, self._secret, self.settings.deadline_s, **me)

    def alive_members(self, role: str, having: str = "") -> list[Member]:
        """Members of a role that are alive and have announced `having`, by index."""
        return [m for m in self.members(role) if m.is_alive and (not having or having in m.info)]

    def wait_for(self, role: str, count: int, deadline_s: float, having: str = "") -> list[Member]:
        """The members that `alive_members` lists, once there are `count` of them."""
        with waiting(f"{count} x {role}", "joining", deadline_s) as wait:
            return wait.until(
                lambda: found if len(found := self.alive_members(role, having)) >= count else None, interval_s=0.01
            )

    def nearest(self, role: str, having: str = "", deadline_s: float | None = None) -> Member:
        """A member that `alive_members` lists, on this host if there is one; this member's index chooses among several."""
        found = self.wait_for(role, 1, self.settings.deadline_s if deadline_s is None else deadline_s, having)
        here = [m for m in found if m.host == self.me.host] or found
        return here[self.me.index % len(here)]


@dataclass(slots=True)
class MemberTable:
    """Members and the time of each one's last heartbeat; pure, callers pass the time."""

    expiry_s: float
    by_name: dict[str, Member] = field(default_factory=dict)
    _beats: dict[str, tuple[int, float]] = field(default_factory=dict)

    def observe(self, member: Member, beat: int, now: float) -> None:
        """Take in one member's entry and its heartbeat counter, which only grows."""
        known = self.by_name.get(member.name)
        if known is not None and known.incarnation > member.incarnation:
            return  # an entry of before, written again
        last, heard = self._beats.get(member.name, (-2, now))
        if beat > last:
            self._beats[member.name] = (beat, now)
            heard = now
        self.by_name[member.name] = msgspec.structs.replace(member, is_alive=now - heard < self.expiry_s)

    def remove(self, name: str) -> None:
        self.by_name.pop(name, None)
        self._beats.pop(name, None)

    def members(self, role: str | None) -> list[Member]:
        """All members, or those of one role, by role and index."""
        return sorted_members(self.by_name.values(), role)


def sorted_members(members: Iterable[Member], role: str | None) -> list[Member]:
    """Those of a role, or all, by role and index."""
    return sorted((m for m in members if role is None or m.role == role), key=lambda m: (m.role, m.index))


class StoreFleet(Fleet):
    """Membership on the fleet's store, from `start` to `leave`. Raises `StoreGone`."""

    def __init__(
        self,
        store_address: str,
        role: str,
        index: int,
        secret: bytes,
        info: Mapping[str, str],
        settings: CommSettings,
        on_store_gone: Callable[[StoreGone], None] | None = None,
    ) -> None:
        self.store_address = store_address
        address = own_address(settings.interface, store_address)
        self._store = connect_store(store_address, settings.deadline_s)
        name = member_name(role, index)
        incarnation = self._store.add(f"fleet/incarnation/{name}", 1)
        me = Member(name, role, index, incarnation, host_id(), os.getpid(), dict(info), host_name=socket.gethostname())
        self._outbox = StoreMailboxes(clone_store(self._store), secret, settings.tls)
        super().__init__(me, self._outbox, settings, secret, address)
        self._on_gone = on_store_gone or _end_process
        self._table = MemberTable(settings.expiry_s)
        self._lock = threading.Lock()
        self._roster: dict[str, None] = {}
        self._entries = EntryReader(secret, name)
        self._beat_count = incarnation << 32
        self._leaving = threading.Event()
        self._heard_at = time.monotonic()
        self._threads = [
            threading.Thread(target=self._beat, args=(clone_store(self._store),), name="fleet heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="fleet watchdog", daemon=True),
        ]

    def start(self) -> "StoreFleet":
        """Become visible to the others and start the heartbeat; returns itself."""
        self._outbox.start()
        self._register()
        self._refresh(self._store)
        for thread in self._threads:
            thread.start()
        return self

    @property
    def run_id(self) -> str:
        return derive_key(self._secret, f"run {os.environ.get(RUN_ID, '')}").hex()[:16]

    def members(self, role: str | None = None) -> list[Member]:
        with self._lock:
            return self._table.members(role)

    def announce(self, **info: str) -> None:
        with self._lock:
            self.me = msgspec.structs.replace(self.me, info={**self.me.info, **info})
            self._publish_member(self.me)
            self._store.check([ROSTER])

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        options = {"secret": self._secret, "tls": self._tls, "interface": self.address}
        return open_link(backend, self._store, name, end, deadline_s, **options)

    def open_group(
        self, name: str, rank: int, size: int, backend: str, deadline_s: float, timeout: timedelta
    ) -> dist.ProcessGroup:
        bind_process_groups(self.address)
        store: Any = dist.PrefixStore(name, connect_store(self.store_address, deadline_s))  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def leave(self) -> None:
        if self._leaving.is_set():
            return
        self.mailboxes.close()
        self._leaving.set()
        for thread in self._threads:
            join_thread(thread, _LEAVE_S)
        try:
            self._publish_member(msgspec.structs.replace(self.me, is_alive=False))
            self._store.set(f"fleet/left/{self.name}", str(self.incarnation))
            self._store.check([ROSTER])
        except DistError as error:
            sys.stderr.write(f"{self.name} leaves the fleet, whose store is gone: {error}\n")

    def _register(self) -> None:
        """Write everything that others read before the name goes on the roster."""
        self._publish_member(self.me)
        self._publish_beat(self._store)
        self._store.delete_key(f"fleet/left/{self.name}")
        if self.incarnation == 1:
            self._store.append(ROSTER, f"{self.name}\n")
        self._store.check([ROSTER])

    def _publish_member(self, me: Member) -> None:
        key = f"fleet/member/{self.name}"
        self._store.set(key, sign_entry(self._secret, key, msgspec.json.encode(me)))

    def _publish_beat(self, store: StoreClient) -> None:
        key = f"fleet/beat/{self.name}"
        self._beat_count += 1
        store.set(key, sign_entry(self._secret, key, str(self._beat_count).encode()))

    def _refresh(self, store: StoreClient) -> None:
        roster = store.get(ROSTER).decode(errors="replace").split()
        for name in roster:  # a name without its entries would block the reads below
            if name not in self._roster and store.check([f"fleet/{kind}/{name}" for kind in ("member", "beat")]):
                self._roster[name] = None
        values = store.multi_get([f"fleet/{kind}/{name}" for name in self._roster for kind in ("member", "beat")])
        now = time.monotonic()
        with self._lock:
            for name, entry, beat in zip(self._roster, values[::2], values[1::2], strict=True):
                member = self._member_of(name, entry) or self._table.by_name.get(name)
                if member is None:
                    continue
                if member.is_alive:
                    count = self._entries.read_number(f"fleet/beat/{name}", beat)
                    self._table.observe(member, -1 if count is None else count, now)
                else:  # its own entry, the last before it left
                    self._table.remove(name)

    def _member_of(self, name: str, entry: bytes) -> Member | None:
        """The member that wrote an entry of the store; None for an entry that no member of this run wrote. Its last one holds."""
        known = self._entries.read(f"fleet/member/{name}", entry)
        return None if known is None else msgspec.json.decode(known, type=Member)

    def _beat(self, store: StoreClient) -> None:
        """Send heartbeats and refresh the table. Waits for its own clock; woken early by `leave`."""
        try:
            while not self._leaving.wait(self.settings.heartbeat_s):
                self._publish_beat(store)
                self._refresh(store)
                self._heard_at = time.monotonic()
        except DistError as error:
            if not self._leaving.is_set():
                self._on_gone(StoreGone(f"{self.name}: the fleet's store at {self.store_address} is gone ({error})"))

    def _watch(self) -> None:
        """End the process when the store stops answering: a frozen host wakes no client. Waits for its own clock.

        Time that this process itself was stopped (a debugger, a frozen container) does not count.
        """
        patience_s = 3 * self.settings.expiry_s
        looked_at = time.monotonic()
        while not self._leaving.wait(self.settings.heartbeat_s):
            stopped_s = time.monotonic() - looked_at - self.settings.heartbeat_s
            looked_at += self.settings.heartbeat_s + stopped_s
            if stopped_s > self.settings.heartbeat_s:
                self._heard_at = min(self._heard_at + stopped_s, looked_at)
            if (silence_s := looked_at - self._heard_at) > patience_s:
                error = f"{self.name}: the fleet's store at {self.store_address} has not answered for {silence_s:.0f} s"
                self._on_gone(StoreGone(error))
                return


def _end_process(error: StoreGone) -> None:
    """End the process at once: without its store it can neither receive the end of the run nor report its own."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(STORE_LOST_EXIT)


def is_shared(relay: Member, fleet: Fleet, settings: CommSettings) -> bool:
    """Whether this process uses the relay's segment, which needs the same host. Raises `SettingError`."""
    is_here = relay.host == fleet.me.host
    if settings.link == "shm" and not is_here:
        raise SettingError(f"comm.link: shm cannot reach {relay.name} on {relay.host_name} from here; use auto")
    return is_here and settings.link in ("auto", "shm")
