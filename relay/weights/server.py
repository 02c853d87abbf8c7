"""The relay's side of the weights: stores versions, makes them visible, sends them on.

Versions come over a link, from actors or from the relay before this one in the chain; those of an actor on this host are copied
from its memory. They leave to the next relay, and to readers on hosts without a relay. A version is visible once its bytes match
the digest that its actor announced; the relay that received it from an actor tells the hub.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext

from ...comm.errors import HeadraceError
from ...comm.fleet import Fleet
from ...comm.links.base import Link
from ...comm.messages.base import Message
from ...comm.messages.weights import OpenPullLink, OpenPushLink, VersionReady
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from ...comm.waits import join_thread
from .chain import Chain
from .transfer import SILENCE_S, VersionReceiver, send_version, send_versions
from .version_store import IncomingVersion, VersionStore, is_trainer

_log = logging.getLogger(__name__)


class WeightServer:
    """Versions of one relay: its threads run from `start` to `close`."""

    def __init__(self, fleet: Fleet, segment: Segment, settings: CommSettings) -> None:
        self.version_store = VersionStore(segment)
        self._fleet = fleet
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._stop = threading.Event()
        self._transfers: list[threading.Thread] = []
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._read_messages, name=f"{fleet.name} weight server", daemon=True)
        self.chain = Chain(fleet, self.version_store.next_source, settings)

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
            case OpenPushLink(segment=path):
                self._start(message, 0, lambda link: self._receive(link, sender, path))
            case OpenPullLink(version=None):
                self._start(message, 1, lambda link: send_versions(link, self.version_store.next_source, self._is_open))
            case OpenPullLink(version=int() as version):
                self._start(message, 1, lambda link: send_version(link, self.version_store.source_of(version)))
            case _:
                _log.warning("%s ignores %s from %s", self._fleet.name, type(message).__name__, sender)

    def _receive(self, link: Link, sender: str, path: str) -> None:
        def complete(incoming: IncomingVersion) -> None:
            _log.info("version %d is here, from %s", incoming.offer.version, sender)
            if is_trainer(sender) and incoming.digest:
                self._mailbox.send("hub", VersionReady(incoming.offer.version, incoming.digest))
            if link.backend == "nccl":  # its bytes come from a GPU: pinned slots serve from the second version on
                self.version_store.slots.pin()

        with closing(Segment.open(path)) if path else nullcontext() as segment:
            # A trainer that was frozen goes on here; if it is a relay that is, the one before it passes it over.
            receiver = VersionReceiver(link, self.version_store, sender, segment, self._fleet.settings.deadline_s)
            receiver.run(self._stop.is_set, complete)

    def _is_open(self) -> bool:
        return not self._stop.is_set()

    def _transfer(self, request: OpenPushLink | OpenPullLink, end: int, work: Callable[[Link], object]) -> None:
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

    def _start(self, request: OpenPushLink | OpenPullLink, end: int, work: Callable[[Link], object]) -> None:
        self._transfers = [thread for thread in self._transfers if thread.is_alive()]
        thread = threading.Thread(
            target=self._transfer, args=(request, end, work), name=f"{self._fleet.name} {request.link}", daemon=True
        )
        self._transfers.append(thread)
        thread.start()
