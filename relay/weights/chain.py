"""The chain of relays: each sends what it holds, and what is still arriving, to the next.

Relays follow each other by incarnation and index, so that one that comes back joins at the tail. When the next relay dies,
the one after it becomes the next, and the transfer goes on at the byte that it had reached. A newcomer is sent the newest
version from whoever is before it.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from ...comm.errors import HeadraceError
from ...comm.fleet import Fleet, Member
from ...comm.links.opening import Link
from ...comm.mailbox import Mailbox
from ...comm.messages import OpenPushLink
from .chunks import ChunkSizer
from .protocol import SILENCE_S
from .transfer import VersionSender
from .version_store import VersionStore

_log = logging.getLogger(__name__)


def chain_order(relays: Sequence[Member]) -> list[Member]:
    """The living relays in the order of the chain, its head first."""
    return sorted((m for m in relays if m.is_alive), key=lambda m: (m.incarnation, m.index))


def successor_of(
    me: Member, relays: Sequence[Member], suspected_until: Mapping[tuple[str, int], float], now: float
) -> Member | None:
    """The next relay after `me`; those shunned until later than `now` are passed over. None at the tail."""
    after = [m for m in chain_order(relays) if (m.incarnation, m.index) > (me.incarnation, me.index)]
    return next((m for m in after if suspected_until.get((m.name, m.incarnation), now) <= now), None)


def open_push_link(fleet: Fleet, mailbox: Mailbox, to: str, backend: str, deadline_s: float) -> Link:
    """Open a link over which this process sends versions to `to`, which has a keeper. Raises `LinkBroken`."""
    name = f"{mailbox.name}>{to} {fleet.incarnation}.{time.monotonic_ns()}"
    mailbox.send(f"{to}/weights", OpenPushLink(name, backend))
    return fleet.open_link(name, 1, deadline_s, backend)


class Chain:
    """The thread of one relay that sends versions to the next."""

    def __init__(self, fleet: Fleet, version_store: VersionStore, segment_path: str, backend: str) -> None:
        self._fleet = fleet
        self._backend = backend
        self._stop = threading.Event()
        self._sender = VersionSender(version_store, segment_path, self._stop, ChunkSizer(fleet.settings.chunk_bytes))
        self._suspected_until: dict[tuple[str, int], float] = {}
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/chain")
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} chain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sending."""
        self._stop.set()
        self._thread.join(2 * SILENCE_S)
        self._sender.close()
        self._mailbox.close()

    def successor(self) -> Member | None:
        """The next relay as things stand."""
        return successor_of(self._fleet.me, self._fleet.members("relay"), self._suspected_until, time.monotonic())

    def _run(self) -> None:
        """Keep linked to the successor. Waits for one to be there and for versions; woken by the clock and the desk."""
        while not self._stop.is_set():
            successor = self.successor()
            if successor is None:
                self._stop.wait(self._fleet.settings.heartbeat_s)
                continue
            try:
                self._serve(successor)
            except HeadraceError as error:
                _log.info("%s: the link to %s broke: %s", self._fleet.name, successor.name, error)
                self._suspected_until[successor.name, successor.incarnation] = time.monotonic() + SILENCE_S

    def _serve(self, successor: Member) -> None:
        identity = (successor.name, successor.incarnation)
        self._sender.num_nodes = 1 + len(chain_order(self._fleet.members("relay")))
        link = open_push_link(self._fleet, self._mailbox, successor.name, self._backend, SILENCE_S)
        try:
            self._sender.send_all(
                link, lambda: (s := self.successor()) is not None and (s.name, s.incarnation) == identity
            )
        finally:
            link.close()
