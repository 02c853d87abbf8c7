"""The trainer's side of the weights: it publishes versions.

`WeightPublisher.publish` returns after one copy into host memory; a thread does the rest, so no relay can stall the trainer.
A version that has not begun to leave is superseded by the next one; one that has begun to leave is finished first.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor

from ...comm.errors import LinkBroken, MessageRefused, PeerGone, WaitTimeout
from ...comm.fleet import Fleet, Member
from ...comm.links.frames import send_idle
from ...comm.mailbox import Mailbox
from ...comm.messages.weights import SlotReserved
from ...comm.recipe import CommSettings
from ...comm.waits import join_thread
from .chain import chain_order
from .layout import Layout
from .pinned import host_buffer
from .protocol import IDLE_S, SILENCE_S
from .push import LinkPush, PendingVersion, SharedMemoryPush, SlotUse, open_push
from .shards import WeightShard
from .slots import Receipt

_log = logging.getLogger(__name__)
_CLOSE_S = 15.0
_RETRY_S = 0.05


class WeightPublisher:
    """The trainer's end: hands versions over to a thread, which pushes them to the head of the relays' chain.

    With several actor ranks each has a publisher of its `part`, and all publish the same versions, as the same incarnation of
    the trainer: rank 0's.
    """

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        settings: CommSettings,
        part: WeightShard | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.layout = layout
        self._part = part or WeightShard.whole(layout)
        self._fleet = fleet
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._handover = _Handover(self._part, incarnation or fleet.incarnation)
        sender = _Sender(fleet, self._mailbox, settings, self._part, self._handover)
        self._thread = threading.Thread(target=sender.run, name=f"{fleet.name} publisher", daemon=True)

    def start(self) -> "WeightPublisher":
        """Start the thread that sends, if it does not run yet; `publish` does so too."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    @property
    def transport(self) -> SharedMemoryPush | LinkPush | None:
        """The transport to the head of the chain, once it is open."""
        return self._handover.transport

    @property
    def failure(self) -> Exception | None:
        return self._handover.failure

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Receipt:
        """Copy the tensors (cast to the layout's dtype) to host memory and return; that is the trainer's whole stall.

        Raises the error that ended the thread, if it has ended.
        """
        self.start()
        pending = self._handover.begin(version)
        self._part.write(tensors, pending.buffer)
        self._handover.commit(pending)
        return Receipt(version, "")

    def close(self) -> None:
        """Wait until the published versions have reached a relay, as long as one lives; then end the thread."""
        self._handover.close(lambda: bool(self._fleet.alive_members("relay", having="segment")))
        join_thread(self._thread, _CLOSE_S)
        self._mailbox.close()


class _Handover:
    """The versions between the trainer and the sender's thread, and the slot reserved ahead. One lock guards all of it.

    A reservation is handed out once. The sender requests the next one only after the version written there has left: until
    then the relay would answer with the same slot.
    """

    def __init__(self, part: WeightShard, incarnation: int) -> None:
        self._part = part
        self.incarnation = incarnation
        self._changed = threading.Condition()
        self._writing: PendingVersion | None = None
        self._waiting: PendingVersion | None = None
        self._sending: PendingVersion | None = None
        self.transport: SharedMemoryPush | LinkPush | None = None
        self._reservation: SlotReserved | None = None
        self._spare: list[np.ndarray] = []
        self.closed = False
        self.failure: Exception | None = None

    def begin(self, version: int) -> PendingVersion:
        """A buffer to write the next version into: the slot reserved for it, else memory of this process."""
        part = self._part
        offer = self._part.offer(version, self.incarnation)
        with self._changed:
            if self.failure is not None:
                raise self.failure
            assert not self.closed, "the publisher is closed"
            superseded = self._waiting
            self._waiting = None
            if superseded is not None and superseded.use is SlotUse.WRITTEN:
                self._writing = replace(superseded, offer=offer)
                return self._writing
            if superseded is not None:
                self._spare.append(superseded.buffer)
            if (found := self._take_reservation()) is not None:
                transport, slot = found
                whose = (slot, partial(transport.is_reserved, slot))
                self._writing = PendingVersion(offer, part, transport.buffer_of(slot), SlotUse.WRITTEN, *whose)
            else:
                self._writing = PendingVersion(offer, part, self.memory(part.num_bytes))
            return self._writing

    def memory(self, num_bytes: int) -> np.ndarray:
        """A buffer for a version in memory of this process: one that is free, else a new one."""
        with self._changed:
            return self._spare.pop() if self._spare else host_buffer(num_bytes)

    def commit(self, pending: PendingVersion) -> None:
        with self._changed:
            self._writing = None
            self._waiting = pending
            self._changed.notify_all()

    def close(self, has_relay: Callable[[], bool]) -> None:
        """Wait until all versions have left, as long as there is a relay; then end the sender."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._waiting is None and self._sending is None) or not has_relay(), _CLOSE_S
            )
            self.closed = True
            self._changed.notify_all()

    def take(self) -> tuple[PendingVersion | None, bool]:
        """The version to send, waited for a while, and whether there will be another."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self.closed, IDLE_S)
            taken = self._sending = self._waiting
            self._waiting = None
            if taken is not None and taken.use is SlotUse.NONE and (found := self._take_reservation()) is not None:
                # The reserved slot goes to this version, so no other may be written there.
                taken.reservation = found[1]
                taken.use = SlotUse.RESERVED
            return taken, taken is not None or not self.closed

    def finish(self, previous: PendingVersion | None) -> None:
        """The taken version has left; the buffer of the one before it is free."""
        with self._changed:
            if previous is not None and previous.use is not SlotUse.WRITTEN:
                self._spare.append(previous.buffer)
            self._sending = None
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = error
            self._waiting = None
            self._sending = None
            self._changed.notify_all()

    def is_obsolete(self, timeout_s: float = 0.0) -> bool:
        """True if the taken version need not leave, because a newer one waits or the publisher is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is not None or self.closed, timeout_s)

    def set_transport(self, transport: SharedMemoryPush | LinkPush | None) -> None:
        """Replace the transport; the one before it is closed, and its reservation is void."""
        with self._changed:
            previous = self.transport
            self.transport = transport
            self._reservation = None
        if previous is not None:
            previous.close()

    @property
    def needs_reservation(self) -> bool:
        """True if no slot is reserved, and none is in use by a version that has not left."""
        with self._changed:
            pending = (self._writing, self._waiting, self._sending)
            return self._reservation is None and not any(p is not None and p.use is SlotUse.WRITTEN for p in pending)

    def add_reservation(self, reservation: SlotReserved | None) -> None:
        with self._changed:
            self._reservation = reservation

    def _take_reservation(self) -> tuple[SharedMemoryPush, SlotReserved] | None:
        taken = self._reservation
        self._reservation = None
        transport = self.transport
        if taken is not None and isinstance(transport, SharedMemoryPush) and transport.is_reserved(taken):
            return transport, taken
        return None


@dataclass
class _Sender:
    """The state of the thread that pushes versions; no other thread uses it."""

    _fleet: Fleet
    _mailbox: Mailbox
    _settings: CommSettings
    _part: WeightShard
    _handover: _Handover
    _last: PendingVersion | None = None
    _head: tuple[str, int] = ("", 0)
    """The relay that took the last version."""
    _suspected_until: dict[tuple[str, int], float] = field(default_factory=dict)
    """Relays that did not take a version, and until when others are tried first."""

    def run(self) -> None:
        """Push what is published. Waits for `publish`, then for a relay; woken by `publish`, `close` and messages."""
        try:
            is_open = True
            while is_open:
                pending, is_open = self._handover.take()
                if pending is not None:
                    previous = self._last
                    self._last = self._push(pending)
                    self._handover.finish(previous)
                if is_open:
                    self._prepare()
        except Exception as error:  # noqa: BLE001 - the border of the thread: the trainer's next publish raises it
            _log.error("%s: the publisher ended: %s", self._fleet.name, str(error))
            self._handover.fail(error)
        finally:
            self._last = None
            self._handover.set_transport(None)

    def _push(self, version: PendingVersion) -> PendingVersion | None:
        """Push a version to the first relay that takes it, unless it becomes obsolete before; returns what to keep of it.

        None if the version was lost with its slot.
        """
        tried: set[tuple[str, int]] = set()
        while not self._handover.closed:
            relay = next((m for m in self._relays() if (m.name, m.incarnation) not in tried), None)
            if relay is None:
                tried.clear()
                if self._handover.is_obsolete(_RETRY_S):
                    break
                continue
            try:
                self._transport_to(relay).push(version)
                self._head = (relay.name, relay.incarnation)
                break
            except (LinkBroken, MessageRefused, PeerGone, WaitTimeout) as error:
                _log.warning("version %d did not reach %s: %s", version.offer.version, relay.name, str(error))
                tried.add((relay.name, relay.incarnation))
                self._suspect(relay)
                if (detached := version.detached(self._handover.memory)) is None:
                    return None
                version = detached
        return version

    def _prepare(self) -> None:
        """Between two versions: keep the way to the head of the chain open, and its next slot reserved.

        A new head may lack a version that the head before it had not yet sent on, so it receives the last version.
        """
        relays = self._relays()
        if not relays:
            return
        try:
            if self._last is not None and self._head != (relays[0].name, relays[0].incarnation):
                detached = self._last.detached(self._handover.memory)
                self._last = None if detached is None else self._push(detached)
            transport = self._transport_to(relays[0])
            if isinstance(transport, LinkPush):
                send_idle(transport.link, SILENCE_S)
            elif self._handover.needs_reservation:
                self._handover.add_reservation(transport.reserve_slot(self._part, self._handover.incarnation))
        except (LinkBroken, MessageRefused, PeerGone, WaitTimeout) as error:
            _log.info("%s: the connection to %s broke: %s", self._fleet.name, relays[0].name, str(error))
            self._suspect(relays[0])

    def _relays(self) -> list[Member]:
        """The relays that may take a version, in the chain's order, those suspected dead last."""
        relays = chain_order(self._fleet.alive_members("relay", having="segment"))
        now = time.monotonic()
        return sorted(relays, key=lambda m: self._suspected_until.get((m.name, m.incarnation), now) > now)

    def _suspect(self, relay: Member) -> None:
        """Skip a relay until the fleet knows whether it is alive. If it is, it misses versions for that long."""
        self._suspected_until[relay.name, relay.incarnation] = time.monotonic() + self._settings.expiry_s
        self._handover.set_transport(None)

    def _transport_to(self, relay: Member) -> SharedMemoryPush | LinkPush:
        transport = self._handover.transport
        if transport is None or (transport.relay.name, transport.relay.incarnation) != (relay.name, relay.incarnation):
            self._handover.set_transport(None)
            transport = open_push(relay, self._fleet, self._mailbox, self._settings)
            self._handover.set_transport(transport)
        return transport
