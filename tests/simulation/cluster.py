"""The shared parts of a simulated run: membership, messages under way, storage units, and versions of the weights.

The messages of a process leave it in their order, and arrive in it. Those that have left arrive even if the process is dead by then;
those that a slow process has not sent yet are lost with it. Messages that the hub did not handle come to its next process again. A
dead process is noticed when its connection ends, when it is silent for too long, or when its next life joins.
"""

import math
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
from msgspec.structs import replace

from headrace.comm.errors import PeerGone, StorageFull, WrongDigest
from headrace.comm.fleet import Member, member_name, sorted_members
from headrace.comm.mailbox import HUB, Envelope, Inbox, Mailbox, Mailboxes
from headrace.comm.messages import Message, VersionReady
from headrace.comm.messages.base import process_of
from headrace.comm.messages.weights import WeightsPulled
from headrace.comm.recipe import CommSettings
from headrace.comm.storage.client import Columns
from headrace.comm.store.inbox import StoredInbox
from headrace.comm.store.protocol import Post
from headrace.comm.waits import waiting
from headrace.launch.lab.virtual.network import MESSAGE_S, LinklessFleet
from headrace.launch.lab.virtual.world import World
from headrace.relay.weights.slots import VersionNotAvailable

from .processes import Killed, VirtualProcess

PUSH_S = 0.05
"""Of a version, from the trainer to a relay."""
KEPT_VERSIONS = 2
"""Of each relay."""
POLL_S = 0.25
"""Shortest wait of a process for a message: it notices other changes that late."""


class Cluster:
    """One start of a run, from its first process to its last."""

    def __init__(self, world: World, run_id: str, settings: CommSettings, unit_rows: int) -> None:
        """unit_rows: of each storage unit, the most that it has room for."""
        self.world = world
        self.run_id = run_id
        self.settings = settings
        self.unit_rows = unit_rows
        self.mailboxes = ClusterMailboxes(self)
        self.members: dict[str, Member] = {}
        self.lives: dict[str, VirtualProcess] = {}
        """The newest life of each process."""
        self.units: dict[str, Unit] = {}
        """Every unit so far, by its address."""
        self.weights = Weights(self)
        self.silent_until: dict[str, float] = {}
        """Processes cut off from the others."""
        self._incarnations: Counter[str] = Counter()

    def join(self, role: str, index: int) -> "ClusterFleet":
        """A new life of a process, visible to the others at once."""
        name = member_name(role, index)
        self._incarnations[name] += 1
        process = self.lives[name] = VirtualProcess(name, self._incarnations[name])
        pid = sum(self._incarnations.values())
        me = self.members[name] = Member(name, role, index, process.incarnation, "here", pid, {}, host_name="here")
        return ClusterFleet(self, me)

    def is_silent(self, name: str) -> bool:
        return self.world.now < self.silent_until.get(name, -math.inf)

    def kill(self, name: str, *, is_noticed: bool) -> None:
        """End the present life of a process. `is_noticed`: its connection ends at once, else its silence tells."""
        process = self.lives[name]
        process.kill()
        for unit in self.units.values():
            if unit.process is process:
                unit.rows.clear()
        noticed_s = MESSAGE_S if is_noticed else self.settings.expiry_s
        self.world.at(self.world.now + noticed_s, partial(self._look_at, process))

    def expire(self, process: VirtualProcess) -> None:
        """Let a process that sends no heartbeat from now on count as dead after a while."""
        self.world.at(self.world.now + self.settings.expiry_s, partial(self._look_at, process))

    def revive(self, process: VirtualProcess) -> None:
        """A process sends heartbeats again."""
        known = self.members.get(process.name)
        if known is not None and known.incarnation == process.incarnation and not process.is_dead:
            self.members[process.name] = replace(known, is_alive=True)

    def _look_at(self, process: VirtualProcess) -> None:
        if process.is_dead:
            self.mailboxes.end_readers(process)
        known = self.members.get(process.name)
        is_quiet = process.is_dead or self.world.now < process.frozen_until or self.is_silent(process.name)
        if known is not None and known.incarnation == process.incarnation and is_quiet:
            self.members[process.name] = replace(known, is_alive=False)


class ClusterMailboxes(Mailboxes):
    """The mailboxes of all processes."""

    def __init__(self, cluster: Cluster) -> None:
        self.left: dict[str, tuple[str, int]] = {}
        """Messages of this kind, or of any, that a process still sends before it is killed."""
        self.on_last: Callable[[str], None] = lambda process: None
        self.slow: dict[str, tuple[float, float]] = {}
        """Processes that send their messages so much later, until a moment."""
        self.twice_until: dict[str, float] = {}
        """Processes whose messages arrive twice."""
        self._cluster = cluster
        self._stored: dict[str, StoredInbox] = {}
        self._readers: dict[str, tuple[Inbox, VirtualProcess | None]] = {}
        self._outboxes: dict[VirtualProcess, deque[tuple[float, Post]]] = {}
        """The messages that each process has not sent yet, and the moments when they leave it."""
        self._arrivals: dict[tuple[str, str], float] = {}
        """When the last message of a process to another one arrives."""

    def open(self, name: str) -> Mailbox:
        inbox: Inbox = queue.SimpleQueue()
        for delivery in self._stored_inbox(name).open(confirms=name == HUB):
            inbox.put(delivery)
        self._readers[name] = inbox, self._cluster.lives.get(process_of(name))
        return ClusterMailbox(name, self._stored[name].num_opened, inbox, self, self._cluster.world)

    def put(self, message: Post) -> None:
        """A process has one connection, whatever its inboxes: its messages leave in their order."""
        world, name = self._cluster.world, process_of(message.sender)
        life = self._cluster.lives.get(name)
        if life is None:
            self._leave(message)
            return
        outbox = self._outboxes.setdefault(life, deque())
        more_s, until = self.slow.get(name, (0.0, -math.inf))
        leaves_at = max(world.now + more_s if world.now < until else world.now, outbox[-1][0] if outbox else 0.0)
        if leaves_at > world.now or outbox:
            outbox.append((leaves_at, message))
            world.at(leaves_at, partial(self._send_next, life))
        else:
            self._leave(message)

    def is_last(self, sender: str, kind: str) -> bool:
        """Whether a process is killed before it sends a message of this kind, which it is about to send."""
        wanted, left = self.left.get(sender, ("", -1))
        if left < 0 or wanted not in ("", kind):
            return False
        self.left[sender] = wanted, left - 1
        if left:
            return False
        del self.left[sender]
        self.on_last(sender)
        return True

    def confirm(self, name: str, place: int) -> None:
        self._cluster.world.at(self._cluster.world.now + MESSAGE_S, partial(self._stored[name].confirm, place))

    def end_readers(self, process: VirtualProcess) -> None:
        """A process is known to be dead: messages to its inboxes wait for its next life."""
        for name in [name for name, (_, reader) in self._readers.items() if reader is process]:
            self.close_inbox(name)

    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        self._readers.pop(name, None)
        self._stored_inbox(name).close(is_last=is_last)

    def close(self) -> None:
        """Nothing to end."""

    def _send_next(self, life: VirtualProcess) -> None:
        """The next message leaves its process, unless that was killed; a frozen one sends it later."""
        world = self._cluster.world
        if world.now < life.frozen_until and not life.was_killed:
            world.at(life.frozen_until, partial(self._send_next, life))
        elif not life.was_killed:
            self._leave(self._outboxes[life].popleft()[1])

    def _leave(self, message: Post) -> None:
        world, sender, to = self._cluster.world, process_of(message.sender), process_of(message.to)
        silent_until = self._cluster.silent_until
        arrival = max(world.now + MESSAGE_S, *(silent_until.get(end, 0.0) for end in (sender, to)))
        self._arrivals[sender, to] = arrival = max(arrival, self._arrivals.get((sender, to), 0.0))
        for _ in range(2 if world.now < self.twice_until.get(sender, -math.inf) else 1):
            world.at(arrival, partial(self._deliver, message))

    def _deliver(self, message: Post) -> None:
        delivery = self._stored_inbox(message.to).add(message.sender, message.sequence, message.body)
        if delivery is not None:
            self._readers[message.to][0].put(delivery)

    def _stored_inbox(self, name: str) -> StoredInbox:
        return self._stored.setdefault(name, StoredInbox(name))


class ClusterMailbox(Mailbox):
    """A mailbox whose reader waits in virtual time."""

    def __init__(self, name: str, epoch: int, inbox: Inbox, mailboxes: ClusterMailboxes, world: World) -> None:
        super().__init__(name, epoch, inbox, mailboxes)
        self._world = world
        self._is_last = mailboxes.is_last

    def send(self, to: str, message: Message) -> None:
        if not self._is_last(process_of(self.name), type(message).__name__):
            super().send(to, message)
        elif self._world.current is not None:
            raise Killed

    def receive(self, timeout_s: float) -> Envelope | None:
        envelope = super().receive(0.0)
        if envelope is None and timeout_s > 0:
            inbox = self._inbox
            self._world.run_until(lambda: not inbox.empty(), self._world.now + max(timeout_s, POLL_S))
            envelope = super().receive(0.0)
        return envelope


class ClusterFleet(LinklessFleet):
    """One life of a process in the cluster."""

    def __init__(self, cluster: Cluster, me: Member) -> None:
        super().__init__(me, cluster.mailboxes, cluster.settings)
        self.cluster = cluster
        self.process = cluster.lives[me.name]

    @property
    def run_id(self) -> str:
        return self.cluster.run_id

    def members(self, role: str | None = None) -> list[Member]:
        return sorted_members(self.cluster.members.values(), role)

    def announce(self, **info: str) -> None:
        self.me = replace(self.me, info={**self.me.info, **info})
        known = self.cluster.members.get(self.name)
        if known is not None and known.incarnation == self.incarnation:
            self.cluster.members[self.name] = replace(self.me, is_alive=known.is_alive)

    def host_rows(self) -> "Unit":  # pyright: ignore[reportIncompatibleMethodOverride] - it has the methods that a relay needs
        address = f"{self.name}#{self.incarnation}"
        unit = self.cluster.units[address] = Unit(address, self.process, self.cluster)
        return unit

    def open_rows(self, address: str) -> "UnitClient":  # pyright: ignore[reportIncompatibleMethodOverride] - it has the methods that rows need
        unit = self.cluster.units[address]
        if unit.process.is_dead:
            raise PeerGone(f"the unit at {address} is gone")
        return UnitClient(unit)

    def leave(self) -> None:
        known = self.cluster.members.get(self.name)
        if known is not None and known.incarnation == self.incarnation:
            del self.cluster.members[self.name]
        self.process.is_dead = True


class Unit:
    """A storage unit: rows by key, until its process dies."""

    def __init__(self, address: str, process: VirtualProcess, cluster: Cluster) -> None:
        self.address = address
        self.process = process
        self.rows: dict[str, dict[str, np.ndarray]] = {}
        self.spoilt: set[str] = set()
        """Keys of rows whose bytes are not those that were written."""
        self._cluster = cluster

    def put(self, rows: Mapping[str, Columns]) -> None:
        self._answer()
        if len(self.rows.keys() | rows.keys()) > self._cluster.unit_rows:
            raise StorageFull(f"the unit at {self.address} is full")
        for key, columns in rows.items():
            self.rows.setdefault(key, {}).update({name: np.array(column) for name, column in columns.items()})

    def get(self, key: str, names: Iterable[str] | None) -> dict[str, np.ndarray]:
        self._answer()
        row = self.rows[key]
        if key in self.spoilt:
            raise WrongDigest(f"row {key} at {self.address}")
        return {name: row[name] for name in (row if names is None else names)}

    def drop(self, keys: Iterable[str]) -> int:
        return sum(self.rows.pop(key, None) is not None for key in keys)

    def listing(self) -> list[str]:
        return list(self.rows)

    def _answer(self) -> None:
        """Wait while the process is frozen; raises `PeerGone` if it is dead."""
        self._cluster.world.run_until(
            lambda: self.process.is_dead or self._cluster.world.now >= self.process.frozen_until,
            self.process.frozen_until,
        )
        if self.process.is_dead:
            raise PeerGone(f"the unit at {self.address} is gone")


class UnitClient:
    """A process's connection to a unit, with the interface of `StorageClient`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def put_many(self, rows: Mapping[str, Columns]) -> None:
        self._unit.put(rows)

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        return self._unit.get(key, columns)

    def get_many(self, keys: Iterable[str], columns: Iterable[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
        return {key: self._unit.get(key, columns) for key in keys}

    def close(self) -> None:
        """Nothing to end."""


class Weights:
    """Which relay has which versions. The trainer's publisher pushes its newest one to each relay that lacks it.

    A relay refuses a version that it has, even from the next life of the trainer, as a real one does.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._held: dict[VirtualProcess, dict[int, str]] = {}
        """The digests of the versions of each relay."""
        self._published: dict[VirtualProcess, tuple[int, str]] = {}
        """The newest version of each life of the trainer."""
        self._boxes: dict[VirtualProcess, Mailbox] = {}

    def publish(self, version: int, digest: str) -> None:
        trainer = self._cluster.lives["actor-0"]
        self._published[trainer] = version, digest
        for relay in self._held:
            self._push(trainer, relay)

    def add_relay(self, relay: VirtualProcess) -> None:
        self._held[relay] = {}
        self._boxes[relay] = self._cluster.mailboxes.open(f"{relay.name}/weights")
        if (trainer := self._cluster.lives.get("actor-0")) is not None:
            self._push(trainer, relay)

    def newest(self) -> WeightsPulled | None:
        """The newest version that a relay has."""
        return max(self._all(), key=lambda pulled: pulled.version, default=None)

    def find(self, version: int) -> WeightsPulled | None:
        """A version that need not be the newest."""
        return next((pulled for pulled in self._all() if pulled.version == version), None)

    def _all(self) -> Iterator[WeightsPulled]:
        for relay, held in self._held.items():
            if not relay.is_dead:
                yield from (WeightsPulled(version, digest) for version, digest in held.items())

    def _push(self, trainer: VirtualProcess, relay: VirtualProcess) -> None:
        if trainer in self._published and not trainer.is_dead:
            self._cluster.world.at(self._cluster.world.now + PUSH_S, partial(self._arrive, trainer, relay))

    def _arrive(self, trainer: VirtualProcess, relay: VirtualProcess) -> None:
        """A relay gets the trainer's newest version; a frozen one does once it goes on."""
        world = self._cluster.world
        if world.now < relay.frozen_until and not relay.is_dead:
            world.at(relay.frozen_until, partial(self._arrive, trainer, relay))
            return
        (version, digest), held = self._published[trainer], self._held[relay]
        if trainer.is_dead or relay.is_dead or version <= max(held, default=-1):
            return
        held[version] = digest
        for older in sorted(held)[:-KEPT_VERSIONS]:
            del held[older]
        self._boxes[relay].send(HUB, VersionReady(version, digest))


class WeightsReader:
    """A rollout's end of the weights' way."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def newest(self) -> int | None:
        newest = self._weights.newest()
        return None if newest is None else newest.version

    def pull(self, into: np.ndarray, deadline_s: float) -> WeightsPulled:
        """The newest version; waits for one while no relay has any. Raises `WaitTimeout`."""
        with waiting("relay", "a version", deadline_s) as wait:
            return wait.until(self._weights.newest)

    def pull_version(self, version: int, into: np.ndarray) -> WeightsPulled:
        if (pulled := self._weights.find(version)) is None:
            raise VersionNotAvailable(f"no relay has version {version}")
        return pulled

    def close(self) -> None:
        """Nothing to end."""
