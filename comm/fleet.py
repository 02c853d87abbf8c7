"""Who is there: members of a run, their incarnations and their heartbeats.

Each process joins under its role and index and beats a counter on the fleet's store. Every member keeps a table of all
members of its own, refreshed each heartbeat by a thread; whoever asks reads that table and never the store. A member whose
counter has stood still for `comm.expiry_s`, by the watcher's own clock, counts as dead until it beats or joins again.

A process whose store is gone cannot be told anything any more: its watchdog ends it with a named error. A run that ends in
order leaves the fleet first, and then the store may go in silence.
"""

import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from torch.distributed import DistError

from .errors import STORE_GONE_EXIT, StoreGone
from .links.opening import Link, MemoryLink, open_link, throttled
from .mailbox import Mailbox, Mailboxes, MemoryMailboxes, StoreMailboxes
from .recipe import CommSettings
from .storage.client import StorageClient
from .storage.server import StorageServer
from .store import ROSTER, StoreClient, connect_store
from .waits import waiting


class Member(msgspec.Struct, frozen=True):
    """One member as the watcher sees it; `info` is what the member announced of itself."""

    name: str
    role: str
    index: int
    incarnation: int
    host: str
    pid: int
    info: dict[str, str]
    is_alive: bool = True


def member_name(role: str, index: int) -> str:
    """ "rollout-1"; the one hub is just "hub"."""
    return role if role == "hub" else f"{role}-{index}"


class Fleet(ABC):
    """One member's view of the run. `Fleet.join` joins over the store; `MemoryFleet` is the twin within one process."""

    def __init__(self, me: Member, mailboxes: Mailboxes, settings: CommSettings, secret: bytes = b"") -> None:
        self.me = me
        self.name = me.name
        self.incarnation = me.incarnation
        self.mailboxes = mailboxes
        self.settings = settings
        self._secret = secret

    @staticmethod
    def join(
        store_address: str, role: str, index: int, secret: bytes, info: Mapping[str, str], settings: CommSettings
    ) -> "StoreFleet":
        """Join the run whose store is at `store_address`; raises `StoreGone`."""
        return StoreFleet(store_address, role, index, secret, info, settings)

    @abstractmethod
    def members(self, role: str | None = None) -> list[Member]:
        """All members that ever joined and have not left, or those of one role, by role and index."""

    @abstractmethod
    def announce(self, **info: str) -> None:
        """Add to what this member says of itself; the others see it within a heartbeat."""

    @abstractmethod
    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        """One end (0 or 1) of the link `name`, once the other end has been opened too."""

    @abstractmethod
    def leave(self) -> None:
        """Deliver what was sent, leave the fleet and end its threads; leaving twice is allowed."""

    def open_mailbox(self, name: str) -> Mailbox:
        """The inbox `name` of this process; one at a time may be open under a name."""
        return self.mailboxes.open(name)

    def host_rows(self, on_client_lost: Callable[[str, int], None] = lambda member, incarnation: None) -> StorageServer:
        """A storage unit in this process, open to every process of the run."""
        return StorageServer(self.settings.interface, self._secret, on_client_lost=on_client_lost)

    def open_rows(self, address: str) -> StorageClient:
        """A client of the unit at an address; raises `PeerGone`."""
        me = {"member": self.name, "incarnation": self.incarnation}
        return StorageClient(address, self._secret, self.settings.deadline_s, **me)

    def alive_members(self, role: str, having: str = "") -> list[Member]:
        """Members of a role that beat, and that have announced `having`, by index."""
        return [m for m in self.members(role) if m.is_alive and (not having or having in m.info)]

    def wait_for(self, role: str, count: int, deadline_s: float, having: str = "") -> list[Member]:
        """The living members of a role once there are `count` of them (that have announced `having`)."""
        with waiting(f"{count} x {role}", "joining", deadline_s) as wait:
            return wait.until(
                lambda: found if len(found := self.alive_members(role, having)) >= count else None, interval_s=0.01
            )

    def nearest(self, role: str, having: str = "", deadline_s: float | None = None) -> Member:
        """A living member of a role, on this host if there is one; several are dealt out by this member's index."""
        found = self.wait_for(role, 1, self.settings.deadline_s if deadline_s is None else deadline_s, having)
        here = [m for m in found if m.host == self.me.host] or found
        return here[self.me.index % len(here)]


@dataclass(slots=True)
class MemberTable:
    """Members and when each was last heard; pure, the clock is handed in."""

    expiry_s: float
    by_name: dict[str, Member] = field(default_factory=dict)
    _beats: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def observe(self, member: Member, beat: bytes, now: float) -> None:
        """Take in what the store says of one member."""
        last, heard = self._beats.get(member.name, (b"", now))
        if beat != last:
            self._beats[member.name] = (beat, now)
            heard = now
        self.by_name[member.name] = with_liveness(member, now - heard < self.expiry_s)

    def remove(self, name: str) -> None:
        """A member has left."""
        self.by_name.pop(name, None)
        self._beats.pop(name, None)

    def members(self, role: str | None) -> list[Member]:
        """The members of a role, by index."""
        found = [m for m in self.by_name.values() if role is None or m.role == role]
        return sorted(found, key=lambda m: (m.role, m.index))


def with_liveness(member: Member, is_alive: bool) -> Member:
    """The member with another judgement."""
    return msgspec.structs.replace(member, is_alive=is_alive)


class StoreFleet(Fleet):
    """Membership on the fleet's store."""

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
        self._store = connect_store(store_address, settings.deadline_s)
        name = member_name(role, index)
        incarnation = self._store.add(f"fleet/incarnation/{name}", 1)
        me = Member(name, role, index, incarnation, socket.gethostname(), os.getpid(), dict(info))
        super().__init__(me, StoreMailboxes(store_address, secret, settings.deadline_s), settings, secret)
        self._on_gone = on_store_gone or _end_process
        self._table = MemberTable(settings.expiry_s)
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._heard_at = time.monotonic()
        self._register()
        self._refresh(self._store)
        self._threads = [
            threading.Thread(target=self._beat, args=(self._store.clone(),), name="fleet beat", daemon=True),
            threading.Thread(target=self._watch, name="fleet watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def members(self, role: str | None = None) -> list[Member]:
        """All members that have not left, or those of one role."""
        with self._lock:
            return self._table.members(role)

    def announce(self, **info: str) -> None:
        """Add to what this member says of itself."""
        with self._lock:
            self.me = msgspec.structs.replace(self.me, info={**self.me.info, **info})
            self._publish_member(self.me)
            self._store.check([ROSTER])

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        """One end of a link whose ends find each other on the store."""
        whom = {"secret": self._secret, "interface": self.settings.interface, "store": self._store}
        return throttled(open_link(backend, self.store_address, name, end, deadline_s, **whom), self.settings.pace)

    def leave(self) -> None:
        """Deliver what was sent, leave, end the threads."""
        if self._leaving.is_set():
            return
        self.mailboxes.close()
        self._leaving.set()
        for thread in self._threads:
            thread.join(5)
        try:
            self._publish_member(with_liveness(self.me, is_alive=False))
            self._store.set(f"fleet/left/{self.name}", str(self.incarnation))
            self._store.check([ROSTER])
        except DistError as error:
            sys.stderr.write(f"{self.name} leaves a fleet whose store is gone: {error}\n")

    def _register(self) -> None:
        """Everything that watchers read is there before the name is on the roster."""
        self._publish_member(self.me)
        self._store.add(f"fleet/beat/{self.name}", 1)
        self._store.delete_key(f"fleet/left/{self.name}")
        if self.incarnation == 1:
            self._store.append(ROSTER, f"{self.name}\n")
        self._store.check([ROSTER])

    def _publish_member(self, me: Member) -> None:
        self._store.set(f"fleet/member/{self.name}", msgspec.json.encode(me))

    def _refresh(self, store: StoreClient) -> None:
        names = store.get(ROSTER).decode().split()
        values = store.multi_get([f"fleet/{kind}/{name}" for name in names for kind in ("member", "beat")])
        now = time.monotonic()
        with self._lock:
            for name, told, beat in zip(names, values[::2], values[1::2], strict=True):
                member = msgspec.json.decode(told, type=Member)
                if member.is_alive:
                    self._table.observe(member, beat, now)
                else:  # its own word, the last before it left
                    self._table.remove(name)

    def _beat(self, store: StoreClient) -> None:
        """Beat and refresh the table. Waits for its own clock; woken early by `leave`."""
        try:
            while not self._leaving.wait(self.settings.heartbeat_s):
                store.add(f"fleet/beat/{self.name}", 1)
                self._refresh(store)
                self._heard_at = time.monotonic()
        except DistError as error:
            if not self._leaving.is_set():
                self._on_gone(StoreGone(f"{self.name}: the fleet's store at {self.store_address} is gone ({error})"))

    def _watch(self) -> None:
        """End the process when the store answers nobody: a frozen host wakes no client. Waits for its own clock."""
        patience_s = 3 * self.settings.expiry_s
        while not self._leaving.wait(self.settings.heartbeat_s):
            if (silence_s := time.monotonic() - self._heard_at) > patience_s:
                told = f"{self.name}: the fleet's store at {self.store_address} has not answered for {silence_s:.0f} s"
                self._on_gone(StoreGone(told))
                return


def _end_process(error: StoreGone) -> None:
    """Without its store a process can neither be told the end of the run nor tell of its own: it ends here and now."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(STORE_GONE_EXIT)


class MemoryNetwork:
    """What members of one process share instead of a store: the post, the table, link ends that wait for their other."""

    def __init__(self) -> None:
        self.mailboxes = MemoryMailboxes()
        self.lock = threading.Condition()
        self.members: dict[str, Member] = {}
        self.incarnations: dict[str, int] = {}
        self.link_ends: dict[str, Link] = {}


class MemoryFleet(Fleet):
    """The twin: several members in one process, threads in the place of processes."""

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
        """Join the town."""
        name = member_name(role, index)
        with network.lock:
            incarnation = network.incarnations[name] = network.incarnations.get(name, 0) + 1
            me = Member(name, role, index, incarnation, host, os.getpid(), dict(info or {}))
            network.members[name] = me
        return MemoryFleet(network, me, settings or CommSettings())

    def members(self, role: str | None = None) -> list[Member]:
        """All members that have not left, or those of one role."""
        with self.network.lock:
            found = [m for m in self.network.members.values() if role is None or m.role == role]
        return sorted(found, key=lambda m: (m.role, m.index))

    def announce(self, **info: str) -> None:
        """Add to what this member says of itself."""
        with self.network.lock:
            self.me = msgspec.structs.replace(self.me, info={**self.me.info, **info})
            self.network.members[self.name] = self.me

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        """One end of a link in memory, whatever the back end asked for."""
        with waiting(f"link {name}", f"end {1 - end}", deadline_s) as wait, self.network.lock:
            mine = f"{name}/{end}"
            if mine not in self.network.link_ends:
                self.network.link_ends[f"{name}/0"], self.network.link_ends[f"{name}/1"] = MemoryLink.pair()
            link = self.network.link_ends[mine]
            self.network.link_ends[f"{mine}/taken"] = link
            self.network.lock.notify_all()
            while f"{name}/{1 - end}/taken" not in self.network.link_ends:
                wait.check()
                self.network.lock.wait(wait.remaining_s)
            return throttled(link, self.settings.pace)

    def crash(self) -> None:
        """Be dead to the others without having left, as after SIGKILL."""
        with self.network.lock:
            self.network.members[self.name] = with_liveness(self.me, is_alive=False)

    def leave(self) -> None:
        """Leave the town."""
        with self.network.lock:
            if self.network.members.get(self.name, self.me).incarnation == self.incarnation:
                self.network.members.pop(self.name, None)
