"""The shared parts of a simulated run: membership, messages under way, storage units, and versions of the weights.

Messages of a dead process still arrive, and messages that the hub did not handle come to its next process again. A dead process is noticed when its connection ends, when its heartbeat stops, or when its next life joins.
"""

import math
import queue
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
from msgspec.structs import replace

from headrace.comm.errors import PeerGone, StorageFull, WrongDigest
from headrace.comm.fleet import Member, member_name, sorted_members
from headrace.comm.mailbox import HUB, Mailbox, Mailboxes, Outgoing, Unconfirmed
from headrace.comm.messages import Message, VersionReady
from headrace.comm.messages.base import process_of
from headrace.comm.recipe import CommSettings
from headrace.comm.signing import Envelope, MessageSigner
from headrace.comm.storage.client import Columns
from headrace.comm.waits import waiting
from headrace.launch.lab.virtual.network import MESSAGE_S, LinklessFleet
from headrace.launch.lab.virtual.world import World
from headrace.relay.weights.slots import Receipt, VersionNotAvailable

from .processes import Killed, VirtualProcess

LOOK_S = 0.3
"""Until a sender notices the hub's next process."""
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
        """End the present life of a process. `is_noticed`: a relay reports the end of its connection, else the heartbeat's end tells."""
        process = self.lives[name]
        process.kill()
        self.mailboxes.forget(name)
        for unit in self.units.values():
            if unit.process is process:
                unit.rows.clear()
            elif (name, process.incarnation) in unit.clients and not unit.process.is_dead and is_noticed:
                self.world.at(self.world.now + MESSAGE_S, partial(unit.report_lost, name, process.incarnation))
        self.expire(process)

    def expire(self, process: VirtualProcess) -> None:
        """Let a process that sends no heartbeat from now on count as dead after a while."""
        self.world.at(self.world.now + self.settings.expiry_s, partial(self._look_at, process))

    def revive(self, process: VirtualProcess) -> None:
        """A process sends heartbeats again."""
        known = self.members.get(process.name)
        if known is not None and known.incarnation == process.incarnation and not process.is_dead:
            self.members[process.name] = replace(known, is_alive=True)

    def _look_at(self, process: VirtualProcess) -> None:
        known = self.members.get(process.name)
        is_quiet = process.is_dead or self.world.now < process.frozen_until or self.is_silent(process.name)
        if known is not None and known.incarnation == process.incarnation and is_quiet:
            self.members[process.name] = replace(known, is_alive=False)


class ClusterMailboxes(Mailboxes):
    """The mailboxes of all processes."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(b"")
        self.left: dict[str, tuple[str, int]] = {}
        """Messages of this kind, or of any, that a process still sends before it is killed."""
        self.on_last: Callable[[str], None] = lambda process: None
        self.slow: dict[str, tuple[float, float]] = {}
        """Processes whose messages take so much longer, until a moment."""
        self.twice_until: dict[str, float] = {}
        """Processes whose messages arrive twice."""
        self._cluster = cluster
        self._inboxes: dict[str, queue.SimpleQueue[bytes | None]] = defaultdict(queue.SimpleQueue)
        self._epochs: Counter[str] = Counter()
        self._unconfirmed = Unconfirmed()
        self._arrivals: dict[tuple[str, str], float] = {}

    def open(self, name: str) -> Mailbox:
        self._epochs[name] += 1
        if name == HUB:
            self._inboxes[name], self.signer = queue.SimpleQueue(), MessageSigner(b"")
            for message in self._unconfirmed:
                self._push(message, self._cluster.world.now + LOOK_S)
        return ClusterMailbox(name, self._epochs[name], self._inboxes[name], self, self._cluster.world)

    def put(self, message: Outgoing) -> None:
        if message.to == HUB:
            self._unconfirmed.add(message)
        self._push(message, self._cluster.world.now)

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

    def confirm(self, handled: Mapping[str, int]) -> None:
        self._unconfirmed.confirm(handled)

    def forget(self, process: str) -> None:
        """A process died: it sends nothing again."""
        kept = [message for message in self._unconfirmed if process_of(message.sender) != process]
        self._unconfirmed = Unconfirmed()
        for message in kept:
            self._unconfirmed.add(message)

    def close_inbox(self, name: str, *, is_last: bool = False) -> None:
        if name == HUB and is_last:
            self._unconfirmed.clear()

    def close(self) -> None:
        """Nothing to end."""

    def _push(self, message: Outgoing, sent_at: float) -> None:
        """Messages of one sender to one inbox arrive in their order."""
        world, pair = self._cluster.world, (message.sender, message.to)
        arrival = sent_at + MESSAGE_S
        more_s, until = self.slow.get(process_of(message.sender), (0.0, -math.inf))
        if sent_at < until:
            arrival += more_s
        for end in (process_of(message.sender), process_of(message.to)):
            arrival = max(arrival, self._cluster.silent_until.get(end, 0.0))
        self._arrivals[pair] = arrival = max(arrival, self._arrivals.get(pair, 0.0))
        for _ in range(2 if sent_at < self.twice_until.get(process_of(message.sender), -math.inf) else 1):
            world.at(arrival, partial(self._deliver, message, self._epochs[HUB]))

    def _deliver(self, message: Outgoing, hub: int) -> None:
        if message.to == HUB and hub != self._epochs[HUB]:
            return  # to the inbox of a hub before; its sender has sent it again
        self._inboxes[message.to].put(message.envelope)


class ClusterMailbox(Mailbox):
    """A mailbox whose reader waits in virtual time."""

    def __init__(
        self, name: str, epoch: int, inbox: "queue.SimpleQueue[bytes | None]", mailboxes: ClusterMailboxes, world: World
    ) -> None:
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

    def open_unit(self, on_client_lost: Callable[[str, int], None]) -> "Unit":
        """The storage unit of this process; its counterpart of `host_rows`."""
        address = f"{self.name}#{self.incarnation}"
        unit = self.cluster.units[address] = Unit(address, self.process, self.cluster, on_client_lost)
        return unit

    def open_rows(self, address: str) -> "UnitClient":  # pyright: ignore[reportIncompatibleMethodOverride] - it has the methods that rows need
        unit = self.cluster.units[address]
        if unit.process.is_dead:
            raise PeerGone(f"the unit at {address} is gone")
        unit.clients.add((self.name, self.incarnation))
        return UnitClient(unit, (self.name, self.incarnation))

    def leave(self) -> None:
        known = self.cluster.members.get(self.name)
        if known is not None and known.incarnation == self.incarnation:
            del self.cluster.members[self.name]
        self.process.is_dead = True


class Unit:
    """A storage unit: rows by key, until its process dies."""

    def __init__(
        self, address: str, process: VirtualProcess, cluster: Cluster, on_client_lost: Callable[[str, int], None]
    ) -> None:
        self.address = address
        self.process = process
        self.rows: dict[str, dict[str, np.ndarray]] = {}
        self.spoilt: set[str] = set()
        """Keys of rows whose bytes are not those that were written."""
        self.clients: set[tuple[str, int]] = set()
        self._on_client_lost = on_client_lost
        self._cluster = cluster

    def report_lost(self, name: str, incarnation: int) -> None:
        """Report the end of a process's connection."""
        if not self.process.is_dead:
            self._on_client_lost(name, incarnation)

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

    def __init__(self, unit: Unit, who: tuple[str, int]) -> None:
        self._unit = unit
        self._who = who

    def put_many(self, rows: Mapping[str, Columns]) -> None:
        self._unit.put(rows)

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        return self._unit.get(key, columns)

    def close(self) -> None:
        self._unit.clients.discard(self._who)


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

    def newest(self) -> Receipt | None:
        """The newest version that a relay has."""
        return max((receipt for receipt in self._all()), default=None)

    def find(self, version: int) -> Receipt | None:
        """A version that need not be the newest."""
        return next((receipt for receipt in self._all() if receipt.version == version), None)

    def _all(self) -> Iterator[Receipt]:
        for relay, held in self._held.items():
            if not relay.is_dead:
                yield from (Receipt(version, digest) for version, digest in held.items())

    def _push(self, trainer: VirtualProcess, relay: VirtualProcess) -> None:
        if trainer in self._published and not trainer.is_dead:
            self._cluster.world.at(self._cluster.world.now + PUSH_S, partial(self._arrive, trainer, relay))

    def _arrive(self, trainer: VirtualProcess, relay: VirtualProcess) -> None:
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

    def pull(self, into: np.ndarray, deadline_s: float) -> Receipt:
        """The newest version; waits for one while no relay has any. Raises `WaitTimeout`."""
        with waiting("relay", "a version", deadline_s) as wait:
            return wait.until(self._weights.newest)

    def pull_version(self, version: int, into: np.ndarray) -> Receipt:
        if (receipt := self._weights.find(version)) is None:
            raise VersionNotAvailable(f"no relay has version {version}")
        return receipt

    def close(self) -> None:
        """Nothing to end."""
