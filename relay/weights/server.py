"""The relay's side of the weights: stores versions, makes them visible, sends them on.

Versions come from actors, which write into the segment where they share the host and send over a link elsewhere, or from
the relay before this one in the chain. They leave to the next relay, and to readers on hosts without a relay. A version is
visible once its bytes match the digest that its actor announced; the relay that received it from an actor tells the hub.
"""

import logging
import threading
from collections.abc import Callable

from ...comm.errors import HeadraceError, LinkBroken, WrongDigest
from ...comm.fleet import Fleet
from ...comm.links.base import Link
from ...comm.links.opening import remote_backend
from ...comm.messages.base import Message
from ...comm.messages.weights import (
    FetchVersion,
    OpenPushLink,
    PushResult,
    ReserveSlot,
    ShardWritten,
    SlotReserved,
    SubscribeVersions,
    VersionReady,
)
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from ...comm.trace import failpoint
from ...comm.waits import join_thread
from .byte_ranges import ranges_of
from .chain import Chain
from .incoming import IncomingState, IncomingVersion, is_trainer
from .protocol import SILENCE_S
from .transfer import VersionSender, receive_versions
from .version_store import VersionStore

_log = logging.getLogger(__name__)
_PUSH = "actor"  # all ranks of the trainer send one version together


class WeightServer:
    """Versions of one relay: its threads run from `start` to `close`."""

    def __init__(self, fleet: Fleet, segment: Segment, settings: CommSettings) -> None:
        self.version_store = VersionStore(segment)
        self._fleet = fleet
        self._segment = segment
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._stop = threading.Event()
        self._sender = VersionSender(self.version_store, segment.path)
        self._transfers: list[threading.Thread] = []
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._read_messages, name=f"{fleet.name} weight server", daemon=True)
        chain_sender = VersionSender(self.version_store, segment.path)
        self.chain = Chain(fleet, chain_sender, remote_backend(settings), SILENCE_S)

    def start(self) -> "WeightServer":
        """Begin to serve. The previous process may have died before it reported the newest version to the hub."""
        if (newest := self.version_store.slots.newest_stored()) is not None:
            self._mailbox.send("hub", VersionReady(newest.version, newest.digest))
        self._thread.start()
        self.chain.start()
        return self

    @property
    def newest(self) -> int | None:
        return self.version_store.slots.newest()

    def close(self) -> None:
        """End all threads; complete versions stay readable in the segment. Closing twice is allowed."""
        if self._stop.is_set():
            return
        self._stop.set()
        self.version_store.close()
        self.chain.close()
        for link in list(self._links):
            link.close()
        for thread in (self._thread, *self._transfers):
            join_thread(thread, 2 * SILENCE_S)
        self._sender.close()
        self._mailbox.close()

    def _read_messages(self) -> None:
        """Consumes the inbox "relay-N/weights"; waits for it alone; woken by messages and the clock."""
        while not self._stop.is_set():
            envelope = self._mailbox.receive(0.1)
            for rank in self._fleet.members("actor"):
                if rank.index == 0:  # its incarnation is the trainer's
                    self.version_store.fence(rank.incarnation)
            if envelope is not None:
                self._answer(envelope.sender, envelope.message)

    def _answer(self, sender: str, message: Message) -> None:
        match message:
            case ReserveSlot():
                self._start("reserve", lambda: self._reserve_slot(sender, message))
            case ShardWritten():
                self._start("check", lambda: self._check(sender, message))
            case OpenPushLink():
                self._start("receive", lambda: self._transfer(message, 0, lambda link: self._receive(link, sender)))
            case FetchVersion(version=version):
                self._start(
                    "send", lambda: self._transfer(message, 1, lambda link: self._sender.send_one(link, version))
                )
            case SubscribeVersions():
                self._start("send", lambda: self._transfer(message, 1, self._send_all))
            case _:
                _log.warning("%s ignores %s from %s", self._fleet.name, type(message).__name__, sender)

    # ---------------------------------------------------------------------------------- pushes through shared memory

    def _reserve_slot(self, sender: str, request: ReserveSlot) -> None:
        incoming = None
        refusal = "this version or a newer one is here or on its way"
        try:
            if request.offer.version < 0:
                incoming = self.version_store.reserve_slot(request.offer)
            elif (opened := self.version_store.begin_receive(request.offer, _PUSH)) is not None:
                incoming = opened[0]
        except (WrongDigest, LinkBroken) as error:
            refusal = str(error)
        if incoming is None:
            self._mailbox.send(sender, PushResult(request.request_id, refusal))
        else:
            slot = incoming.slot
            self._mailbox.send(sender, SlotReserved(request.request_id, slot.slot, slot.generation))

    def _check(self, sender: str, written: ShardWritten) -> None:
        """Check one part's digest; the last right part makes the version visible."""
        offer = written.offer
        refusal = ""
        incoming = self.version_store.bind_reservation(offer, _PUSH, written.generation)
        if incoming is None:
            refusal = "the slot was taken back"
        else:
            failpoint("push", version=offer.version)
            self.version_store.advance(incoming, offer.part, _PUSH, ranges_of(offer).num_bytes)
            if not self.version_store.finish(incoming, offer.part, written.digest):
                refusal = "digest mismatch"
            self._announce(incoming)
        self._mailbox.send(sender, PushResult(written.request_id, refusal))

    def _announce(self, incoming: IncomingVersion) -> None:
        if incoming.state is IncomingState.COMPLETE:
            self._mailbox.send("hub", VersionReady(incoming.offer.version, incoming.digest))

    # ------------------------------------------------------------------------------------------- transfers over links

    def _receive(self, link: Link, sender: str) -> None:
        def complete(incoming: IncomingVersion) -> None:
            if is_trainer(sender):
                self._announce(incoming)
            if link.backend == "nccl":  # its bytes come from a GPU: pinned slots serve from the second version on
                for index in range(self._segment.num_slots):
                    self.version_store.slots.pin(index)

        receive_versions(link, self.version_store, sender, self._stop.is_set, complete)

    def _send_all(self, link: Link) -> None:
        self._sender.send_all(link, lambda: not self._stop.is_set())

    def _transfer(
        self, request: OpenPushLink | FetchVersion | SubscribeVersions, end: int, work: Callable[[Link], None]
    ) -> None:
        try:
            link = self._fleet.open_link(request.link, end, SILENCE_S, request.backend)
        except HeadraceError as error:
            _log.warning("%s: link %s did not open: %s", self._fleet.name, request.link, str(error))
            return
        self._links.append(link)
        try:
            work(link)
        except HeadraceError as error:
            _log.info("%s: link %s ended: %s", self._fleet.name, request.link, str(error))
        finally:
            link.close()
            self._links.remove(link)

    def _start(self, what: str, work: Callable[[], None]) -> None:
        self._transfers = [thread for thread in self._transfers if thread.is_alive()]
        thread = threading.Thread(target=work, name=f"{self._fleet.name} {what}", daemon=True)
        self._transfers.append(thread)
        thread.start()
