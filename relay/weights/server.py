"""The relay's side of the weights: takes versions in, makes them visible, sends them on.

Versions come from actors, which write into the segment where they share the host and send over a link elsewhere, or from
the relay before this one in the chain. They leave to the next relay, and to readers on hosts without a relay. A version is
visible here once its bytes have the digest that its actor announced; the relay that took it from an actor tells the hub.
"""

import logging
import threading
from collections.abc import Callable

from ...comm.errors import HeadraceError, LinkBroken, WrongDigest
from ...comm.fleet import Fleet
from ...comm.links.opening import Link
from ...comm.messages import (
    FetchVersion,
    Message,
    OpenPushLink,
    PushResult,
    ReserveSlot,
    ShardWritten,
    SlotReserved,
    SubscribeVersions,
    VersionReady,
)  # fmt: skip
from ...comm.messages.weights import Offer
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from .chain import Chain
from .chunks import ChunkSizer
from .frames import ranges_of
from .incoming import IncomingState, IncomingVersion
from .protocol import SILENCE_S
from .push import pin, remote_backend
from .transfer import VersionSender, receive_versions
from .version_store import VersionStore

_log = logging.getLogger(__name__)
_PUSH = "actor"  # all ranks of the trainer bring one version together


class WeightServer:
    """The keeper of one relay: its threads run from construction to `close`."""

    def __init__(self, fleet: Fleet, segment: Segment, settings: CommSettings) -> None:
        self.version_store = VersionStore(segment)
        self._fleet = fleet
        self._segment = segment
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._stop = threading.Event()
        self._sender = VersionSender(self.version_store, segment.path, self._stop, ChunkSizer(settings.chunk_bytes))
        self._transfer_threads: list[threading.Thread] = []
        self._links: list[Link] = []
        self._pinned: set[int] = set()
        self._message_thread = threading.Thread(target=self._read_messages, name=f"{fleet.name} keeper", daemon=True)
        self._message_thread.start()
        self._chain = Chain(fleet, self.version_store, segment.path, remote_backend(settings))

    @property
    def newest(self) -> int | None:
        """The newest version that is visible here."""
        return self.version_store.slots.newest()

    def close(self) -> None:
        """End all threads; what is complete stays readable in the segment. Closing twice is allowed."""
        if self._stop.is_set():
            return
        self._stop.set()
        self.version_store.close()
        self._chain.close()
        for link in list(self._links):
            link.close()
        self._message_thread.join(2 * SILENCE_S)
        for thread in self._transfer_threads:
            thread.join(2 * SILENCE_S)
        self._sender.close()
        self._mailbox.close()

    def _read_messages(self) -> None:
        """Answer letters. Consumes the inbox "relay-N/weights"; waits for it alone; woken by letters and the clock."""
        while not self._stop.is_set():
            if (letter := self._mailbox.receive(0.1)) is not None:
                self._answer(letter.sender, letter.message)

    def _answer(self, sender: str, message: Message) -> None:
        match message:
            case ReserveSlot():
                self._start("grant", lambda: self._reserve_slot(sender, message))
            case ShardWritten():
                self._start("check", lambda: self._check(sender, message))
            case OpenPushLink(link=name, backend=backend):
                self._start(
                    "take", lambda: self._start_transfer(name, 0, backend, lambda link: self._receive(link, sender))
                )
            case FetchVersion(link=name, backend=backend, version=version):
                self._start(
                    "feed",
                    lambda: self._start_transfer(name, 1, backend, lambda link: self._sender.send_one(link, version)),
                )
            case SubscribeVersions(link=name, backend=backend):
                self._start(
                    "feed",
                    lambda: self._start_transfer(
                        name, 1, backend, lambda link: self._sender.send_all(link, lambda: True)
                    ),
                )
            case _:
                _log.warning("%s does not understand %s from %s", self._fleet.name, type(message).__name__, sender)

    # ---------------------------------------------------------------------------------- pushes through shared memory

    def _reserve_slot(self, sender: str, request: ReserveSlot) -> None:
        try:
            if request.offer.version < 0:
                arrival = self.version_store.reserve_slot(request.offer)
            else:
                opened = self.version_store.begin_receive(request.offer, _PUSH)
                arrival = opened[0] if opened else None
        except (WrongDigest, LinkBroken) as error:
            self._mailbox.send(sender, PushResult(request.request_id, str(error)))
            return
        if arrival is None:
            self._mailbox.send(sender, PushResult(request.request_id, "a version as new is here or on its way"))
        else:
            self._mailbox.send(sender, SlotReserved(request.request_id, arrival.slot.slot, arrival.slot.generation))

    def _check(self, sender: str, written: ShardWritten) -> None:
        """Check one part's digest; the last right part makes the version visible."""
        arrival = self.version_store.bind_reservation(written.offer, _PUSH, written.generation)
        if arrival is None:
            refusal = "the slot was taken back"
        elif not self._advance_and_finish(arrival, written.offer, written.digest):
            refusal = "its bytes have not the digest announced"
        else:
            refusal = ""
        self._mailbox.send(sender, PushResult(written.request_id, refusal))

    def _advance_and_finish(self, arrival: IncomingVersion, offer: Offer, digest: str) -> bool:
        self.version_store.advance(arrival, offer.part, _PUSH, ranges_of(offer).num_bytes)
        is_right = self.version_store.finish(arrival, offer.part, digest)
        self._announce(arrival)
        return is_right

    def _announce(self, arrival: IncomingVersion) -> None:
        if arrival.state is IncomingState.COMPLETE:
            self._mailbox.send("hub", VersionReady(arrival.offer.version, arrival.digest))

    # ------------------------------------------------------------------------------------------- transfers over links

    def _receive(self, link: Link, sender: str) -> None:
        def complete(arrival: IncomingVersion) -> None:
            if sender.startswith("actor"):
                self._announce(arrival)
            if link.backend == "nccl":  # its bytes come from a GPU: from the first version on, into pinned slots
                for index in range(self._segment.num_slots):
                    pin(self._segment.slot(index), self._pinned)

        receive_versions(link, self.version_store, sender, self._stop.is_set, complete)

    def _start_transfer(self, name: str, end: int, backend: str, work: Callable[[Link], None]) -> None:
        try:
            link = self._fleet.open_link(name, end, SILENCE_S, backend)
        except HeadraceError as error:
            _log.warning("%s: link %s did not come about: %s", self._fleet.name, name, str(error))
            return
        self._links.append(link)
        try:
            work(link)
        except HeadraceError as error:
            _log.info("%s: link %s ended: %s", self._fleet.name, name, error)
        finally:
            link.close()
            self._links.remove(link)

    def _start(self, what: str, work: Callable[[], None]) -> None:
        self._transfer_threads = [thread for thread in self._transfer_threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=f"{self._fleet.name} {what}", daemon=True)
        self._transfer_threads.append(thread)
        thread.start()
