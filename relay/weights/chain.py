"""The chain that versions go down: the trainer, then the relays. Each node sends what it has to the next, also what still arrives.

Relays are ordered by incarnation and index, so a relay that comes back joins at the tail. When the next relay dies, the one
after it becomes the next, and the transfer continues at the byte that it had reached. A new next relay receives the newest
version again: the one before may have died before it sent it on.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from ...comm.errors import HeadraceError, SettingError
from ...comm.fleet import Fleet, Member, is_shared
from ...comm.links.opening import remote_backend
from ...comm.messages.weights import OpenPushLink
from ...comm.recipe import CommSettings
from ...comm.waits import join_thread
from .transfer import MAX_PIECE_BYTES, SILENCE_S, NextSource, send_versions

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
"""Seconds between two checks for a successor, as long as it is missing."""


def chain_order(relays: Sequence[Member]) -> list[Member]:
    """The living relays in the order of the chain, its head first."""
    return sorted((m for m in relays if m.is_alive), key=lambda m: (m.incarnation, m.index))


def successor_of(
    me: Member, relays: Sequence[Member], suspected_until: Mapping[tuple[str, int], float], now: float
) -> Member | None:
    """The next relay after `me`, if possible one that is not suspected dead. None at the tail."""
    order = chain_order(relays)
    after = [m for m in order if me.role != "relay" or (m.incarnation, m.index) > (me.incarnation, me.index)]
    return min(after, key=lambda m: suspected_until.get((m.name, m.incarnation), now) > now, default=None)


class Chain:
    """The thread of one node that sends versions to the next."""

    def __init__(self, fleet: Fleet, next_source: NextSource, settings: CommSettings, segment: str = "") -> None:
        """segment: the path of the memory from which a relay on this host may copy what `next_source` offers."""
        self.failure: SettingError | None = None
        """The setting that ended the thread."""
        self._fleet = fleet
        self._next_source = next_source
        self._settings = settings
        self._segment = segment
        self._stop = threading.Event()
        self._suspected_until: dict[tuple[str, int], float] = {}
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/chain")
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} chain", daemon=True)

    def start(self) -> None:
        """Start to send; a second call changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop sending; closing twice is allowed."""
        self._stop.set()
        join_thread(self._thread, 2 * SILENCE_S)
        self._mailbox.close()

    def _run(self) -> None:
        """Keep a link to the successor. Waits for a successor and for versions; woken by the clock and by versions."""
        while not self._stop.is_set():
            successor = self._successor()
            if successor is None or self._is_suspected(successor):
                self._stop.wait(_LOOK_S)
                successor = self._successor()
            if successor is None or self._stop.is_set():
                continue
            try:
                self._send_to(successor)
            except SettingError as error:
                _log.error("%s sends no versions: %s", self._fleet.name, str(error))
                self.failure = error
                return
            except HeadraceError as error:
                _log.info(
                    "%s: the link to %s broke; others come first: %s", self._fleet.name, successor.name, str(error)
                )
                # By then the fleet knows whether it lives.
                until = time.monotonic() + self._settings.expiry_s
                self._suspected_until[successor.name, successor.incarnation] = until

    def _is_suspected(self, relay: Member) -> bool:
        return self._suspected_until.get((relay.name, relay.incarnation), 0.0) > time.monotonic()

    def _successor(self) -> Member | None:
        relays = self._fleet.alive_members("relay", having="segment")
        return successor_of(self._fleet.me, relays, self._suspected_until, time.monotonic())

    def _send_to(self, relay: Member) -> None:
        def is_next() -> bool:
            found = self._successor()
            is_same = found is not None and (found.name, found.incarnation) == (relay.name, relay.incarnation)
            return is_same and not self._stop.is_set()

        fleet = self._fleet
        backend = remote_backend(self._settings)
        is_staged = backend != "tcp"
        can_copy = bool(self._segment) and not is_staged and is_shared(relay, fleet, self._settings)
        name = f"{self._mailbox.name}>{relay.name} {fleet.incarnation}.{time.monotonic_ns()}"
        self._mailbox.send(f"{relay.name}/weights", OpenPushLink(name, backend, self._segment if can_copy else ""))
        num_nodes = 1 + len(fleet.alive_members("relay"))
        # Staging buckets overlap within a piece.
        piece_bytes = MAX_PIECE_BYTES if is_staged else None
        with closing(fleet.open_link(name, 1, SILENCE_S, backend)) as link:
            send_versions(link, self._next_source, is_next, num_nodes, piece_bytes)
