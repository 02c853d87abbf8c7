"""The chain of relays: each sends the versions that it holds, also those that still arrive, to the next.

Relays are ordered by incarnation and index, so a relay that comes back joins at the tail. When the next relay dies, the one
after it becomes the next, and the transfer continues at the byte that it had reached. A new relay receives the newest version
from the relay before it.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ...comm.errors import HeadraceError
from ...comm.links.base import Link
from ...comm.messages.weights import OpenPushLink
from ...comm.waits import join_thread

if TYPE_CHECKING:
    from ...comm.fleet import Fleet, Member
    from ...comm.mailbox import Mailbox
    from .transfer import VersionSender

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
"""Seconds between two looks for a successor while there is none."""


def chain_order(relays: "Sequence[Member]") -> "list[Member]":
    """The living relays in the order of the chain, its head first."""
    return sorted((m for m in relays if m.is_alive), key=lambda m: (m.incarnation, m.index))


def successor_of(
    me: "Member", relays: "Sequence[Member]", suspected_until: Mapping[tuple[str, int], float], now: float
) -> "Member | None":
    """The next relay after `me` that is not suspected dead beyond `now`. None at the tail."""
    after = [m for m in chain_order(relays) if (m.incarnation, m.index) > (me.incarnation, me.index)]
    return next((m for m in after if suspected_until.get((m.name, m.incarnation), now) <= now), None)


def open_push_link(fleet: "Fleet", mailbox: "Mailbox", to: str, backend: str, deadline_s: float) -> Link:
    """Open a link over which this process sends versions to `to`, which has a weight server. Raises `LinkBroken`."""
    name = f"{mailbox.name}>{to} {fleet.incarnation}.{time.monotonic_ns()}"
    mailbox.send(f"{to}/weights", OpenPushLink(name, backend))
    return fleet.open_link(name, 1, deadline_s, backend)


class Chain:
    """The thread of one relay that sends versions to the next."""

    def __init__(self, fleet: "Fleet", sender: "VersionSender", backend: str, silence_s: float) -> None:
        """The chain closes `sender`; its links have this back end, and break after `silence_s` without a frame."""
        self._fleet = fleet
        self._sender = sender
        self._stop = threading.Event()
        self._backend = backend
        self._silence_s = silence_s
        self._suspected_until: dict[tuple[str, int], float] = {}
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/chain")
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} chain", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop sending; closing twice is allowed."""
        self._stop.set()
        join_thread(self._thread, 2 * self._silence_s)
        self._sender.close()
        self._mailbox.close()

    def _run(self) -> None:
        """Keep a link to the successor. Waits for a successor and for versions; woken by the clock and the store."""
        while not self._stop.is_set():
            successor = self._successor()
            if successor is None:
                self._stop.wait(_LOOK_S)
                continue
            try:
                self._send_to(successor)
            except HeadraceError as error:
                _log.info(
                    "%s: the link to %s broke; it is skipped for a while: %s",
                    self._fleet.name,
                    successor.name,
                    error,
                )
                self._suspected_until[successor.name, successor.incarnation] = time.monotonic() + self._silence_s

    def _successor(self) -> "Member | None":
        return successor_of(self._fleet.me, self._fleet.members("relay"), self._suspected_until, time.monotonic())

    def _send_to(self, successor: "Member") -> None:
        def is_next() -> bool:
            found = self._successor()
            is_same = found is not None and (found.name, found.incarnation) == (successor.name, successor.incarnation)
            return is_same and not self._stop.is_set()

        num_nodes = 1 + len(chain_order(self._fleet.members("relay")))
        link = open_push_link(self._fleet, self._mailbox, successor.name, self._backend, self._silence_s)
        with closing(link):
            self._sender.send_all(link, is_next, num_nodes)
