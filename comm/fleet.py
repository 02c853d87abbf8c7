"""Membership: the processes of a run, their incarnations, and which of them are alive.

Each process joins the run's store (`comm/store`) under its role and index. The store sends the members of a role, and each change of
them, to every process that has asked for that role. A member counts as dead once its connection to the store has ended, or once it has
been silent for `comm.expiry_s`. A silent member that is heard again counts as alive; after a lost connection its next process joins.

A process that loses the store ends with a named error, since it can receive no messages. At the end of a run the processes leave the
fleet before the store ends.
"""

import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import msgspec

from . import threads
from .environment import RUN_ID
from .errors import STORE_LOST_EXIT, SettingError, StoreGone, WaitTimeout
from .links.base import Link
from .links.handshake import derive_key
from .links.host import host_id, own_address
from .links.opening import open_link
from .links.tls import TlsIdentity
from .mailbox import Mailbox, Mailboxes, StoreMailboxes
from .recipe import CommSettings
from .storage.client import StorageClient
from .storage.server import StorageServer
from .store.client import StoreClient
from .store.members import TRAINS_AGAIN, Member, member_name, sorted_members
from .store.protocol import Announce, Changed, Join, Leave, Watch
from .store.state import ALL_ROLES
from .waits import Wait, waiting

if TYPE_CHECKING:
    import torch.distributed as dist

_LEAVE_S = 5.0


class Fleet(ABC):
    """One member's view of the run. `StoreFleet.join` connects to the store; tests have a counterpart within one process."""

    def __init__(
        self,
        me: Member,
        mailboxes: Mailboxes,
        settings: CommSettings,
        secret: bytes = b"",
        address: str = "127.0.0.1",
        tls: TlsIdentity | None = None,
    ) -> None:
        self.me = me
        self.address = address
        """The address of this host on which this member listens."""
        self.name = me.name
        self.incarnation = me.incarnation
        self.mailboxes = mailboxes
        self.settings = settings
        self._secret = secret
        self._tls = tls

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The ID of this start of the run. It survives the restart of single processes; a resumed run has another one."""

    @abstractmethod
    def members(self, role: str | None = None) -> list[Member]:
        """All members that ever joined and have not left, or those of one role, by role and index."""

    @abstractmethod
    def announce(self, **info: str) -> None:
        """Add facts about this member; the store sends them to the others."""

    @abstractmethod
    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        """One end (0 or 1) of the link `name`, once the other end is open too. Raises `LinkBroken` or `WaitTimeout`."""

    @abstractmethod
    def open_group(
        self, name: str, rank: int, size: int, backend: str, deadline_s: float, timeout: timedelta
    ) -> "dist.ProcessGroup":
        """The process group `name` of this role's ranks; `timeout` bounds each of its collectives. Raises `StoreGone`."""

    @abstractmethod
    def leave(self) -> None:
        """Deliver the messages already sent, leave the fleet and end its threads; leaving twice is allowed."""

    def keep_waiting(self, wait: Wait) -> None:
        """Restart the clock of a wait for the first version while an actor retrains steps. That may take hours; the actor reports its progress."""
        if any(actor.info.get(TRAINS_AGAIN) for actor in self.alive_members("actor")):
            wait.since = threads.seconds()

    def open_mailbox(self, name: str) -> Mailbox:
        """Open the inbox `name` of this process; only one may be open under a name at a time."""
        return self.mailboxes.open(name)

    def host_rows(self) -> StorageServer:
        """A storage unit in this process, open to every process of the run."""
        return StorageServer(self.address, self._secret, tls=self._tls).start()

    def open_rows(self, address: str) -> StorageClient:
        """A client of the unit at an address; raises `PeerGone`."""
        return StorageClient(address, self._secret, self.settings.deadline_s, tls=self._tls)

    def alive_members(self, role: str, having: str = "") -> list[Member]:
        """Members of a role that are alive and have announced the fact `having`, by index."""
        return [m for m in self.members(role) if m.is_alive and (not having or having in m.info)]

    def wait_for(self, role: str, count: int, deadline_s: float, having: str = "") -> list[Member]:
        """The members that `alive_members` lists, once there are `count` of them."""
        with waiting(f"{count} x {role}", "joining", deadline_s) as wait:
            return wait.until(
                lambda: found if len(found := self.alive_members(role, having)) >= count else None, interval_s=0.01
            )

    def nearest(self, role: str, having: str = "") -> Member:
        """A member from `alive_members`, on this host if there is one. Members spread over several by their own index."""
        found = self.wait_for(role, 1, self.settings.deadline_s, having)
        here = [m for m in found if m.host == self.me.host] or found
        return here[self.me.index % len(here)]


class StoreFleet(Fleet):
    """Membership on the run's store, from `join` to `leave`. Raises `StoreGone`."""

    def __init__(
        self,
        store: StoreClient,
        me: Member,
        secret: bytes,
        settings: CommSettings,
        address: str,
        tls: TlsIdentity | None,
        on_store_gone: Callable[[StoreGone], None],
    ) -> None:
        self._boxes = StoreMailboxes(store)
        super().__init__(me, self._boxes, settings, secret, address, tls)
        self.store = store
        self._members: dict[str, Member] = {}
        self._watched: set[str] = set()
        self._lock = threading.Lock()
        self._on_store_gone = on_store_gone
        self._has_left = False

    @classmethod
    def join(
        cls,
        store_address: str,
        role: str,
        index: int,
        secret: bytes,
        info: Mapping[str, str],
        settings: CommSettings,
        on_store_gone: Callable[[StoreGone], None] | None = None,
    ) -> Self:
        """Join; the member is visible to the others from now on. Raises `StoreGone` or `SettingError`."""
        address = own_address(settings.interface, store_address)
        tls = TlsIdentity() if settings.tls else None
        store = StoreClient.connect(
            store_address,
            secret,
            settings.deadline_s,
            tls=tls,
            heartbeat_s=settings.heartbeat_s,
            patience_s=3 * settings.expiry_s,
        )
        me = Member(
            member_name(role, index), role, index, 0, host_id(), os.getpid(), dict(info), host_name=socket.gethostname()
        )
        incarnation = store.ask(lambda number: Join(number, me, settings.expiry_s))
        assert isinstance(incarnation, int)
        me = msgspec.structs.replace(me, incarnation=incarnation)
        fleet = cls(store, me, secret, settings, address, tls, on_store_gone or _end_process)
        store.on_changed = fleet._on_changed
        store.on_gone = fleet._on_gone
        if store.gone is not None:
            fleet._on_gone(store.gone)
        return fleet

    @property
    def run_id(self) -> str:
        return derive_key(self._secret, f"run {os.environ.get(RUN_ID, '')}").hex()[:16]

    def members(self, role: str | None = None) -> list[Member]:
        self._watch(ALL_ROLES if role is None else role)
        with self._lock:
            return sorted_members(self._members.values(), role)

    def announce(self, **info: str) -> None:
        with self._lock:
            self.me = msgspec.structs.replace(self.me, info={**self.me.info, **info})
            self.store.tell(Announce(self.me.info))

    def open_link(self, name: str, end: int, deadline_s: float, backend: str = "tcp") -> Link:
        options = {"secret": self._secret, "tls": self._tls, "interface": self.address}
        return open_link(backend, self.store, name, end, deadline_s, **options)

    def open_group(
        self, name: str, rank: int, size: int, backend: str, deadline_s: float, timeout: timedelta
    ) -> "dist.ProcessGroup":
        from .links.process_group import meeting_store, open_world

        found = meeting_store(self.store, self.address, name, deadline_s, is_host=rank == 0)
        return open_world(found, self.address, rank, size, backend, timeout)

    def leave(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self.mailboxes.close()
        try:
            self.store.ask(Leave, _LEAVE_S)
        except (StoreGone, WaitTimeout) as error:
            sys.stderr.write(f"{self.name}: the store was gone before this process left the fleet: {error}\n")
        self.store.close()

    def _watch(self, role: str) -> None:
        """Ask the store for the members of a role; they are known when this returns."""
        if role not in self._watched and ALL_ROLES not in self._watched and self.store.gone is None:
            self.store.ask(lambda number: Watch(number, role))
            self._watched.add(role)

    def _on_changed(self, changed: Changed) -> None:
        with self._lock:
            self._members |= {member.name: member for member in changed.members}
            for name in changed.left:
                self._members.pop(name, None)

    def _on_gone(self, error: StoreGone) -> None:
        self._boxes.on_gone(error)
        if not self._has_left:
            self._on_store_gone(StoreGone(f"{self.name}: {error}"))


def _end_process(error: StoreGone) -> None:
    """End the process at once: without the store it can neither learn that the run ends nor report its own end."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(STORE_LOST_EXIT)


def is_shared(relay: Member, fleet: Fleet, settings: CommSettings) -> bool:
    """Whether this process maps the relay's shared memory, which requires the same host. Raises `SettingError`."""
    is_here = relay.host == fleet.me.host
    if settings.link == "shm" and not is_here:
        raise SettingError(f"comm.link: shm cannot reach {relay.name} on {relay.host_name} from here; use auto")
    return is_here and settings.link in ("auto", "shm")
