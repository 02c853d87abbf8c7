"""A reader on a host without a relay: versions are fed over a link into memory of its own while the generator goes on."""

import logging
import threading
import time

import numpy as np

from ...comm.errors import HeadraceError, LinkBroken
from ...comm.fleet import Fleet
from ...comm.links.opening import Link
from ...comm.messages import FetchVersion, SubscribeVersions
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from .protocol import SILENCE_S
from .push import remote_backend
from .transfer import receive_version, receive_versions
from .version_store import VersionStore

_log = logging.getLogger(__name__)


def fetch_version(fleet: Fleet, version: int, into: np.ndarray, settings: CommSettings) -> str | None:
    """Bring one version into a buffer, uint8 [num_bytes], from any relay that still holds it: its digest, or None."""
    mailbox = fleet.open_mailbox(f"{fleet.name}/fetch")
    try:
        for relay in fleet.alive_members("relay", having="segment"):
            name = f"{relay.name}>{mailbox.name} {fleet.incarnation}.{time.monotonic_ns()}"
            mailbox.send(f"{relay.name}/weights", FetchVersion(name, remote_backend(settings), version))
            try:
                link = fleet.open_link(name, 0, SILENCE_S, remote_backend(settings))
            except HeadraceError as error:
                _log.warning("%s: no link to %s: %s", fleet.name, relay.name, str(error))
                continue
            try:
                if (digest := receive_version(link, into)) is not None:
                    return digest
            except LinkBroken as error:
                _log.warning("%s: version %d did not come from %s: %s", fleet.name, version, relay.name, str(error))
            finally:
                link.close()
        return None
    finally:
        mailbox.close()


class WeightMirror:
    """Keeps a segment of this process filled by whichever relay is there."""

    def __init__(self, fleet: Fleet, segment: Segment, settings: CommSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._version_store = VersionStore(segment)
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._stop = threading.Event()
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._link is not None:
            self._link.close()
        self._thread.join(2 * SILENCE_S)
        self._version_store.close()
        self._mailbox.close()

    def _run(self) -> None:
        """Take in versions. Waits for a living relay and its link; woken by frames, and by the clock when it has none."""
        turn = self._fleet.me.index
        while not self._stop.is_set():
            relays = self._fleet.alive_members("relay", having="segment")
            if not relays:
                self._stop.wait(self._settings.heartbeat_s)
                continue
            try:
                self._receive_from(relays[turn % len(relays)].name)
            except HeadraceError as error:
                turn += 1  # another relay may be better off
                if not self._stop.is_set():
                    _log.warning("%s: its feed broke: %s", self._fleet.name, error)

    def _receive_from(self, relay: str) -> None:
        name = f"{relay}>{self._fleet.name} {self._fleet.incarnation}.{time.monotonic_ns()}"
        backend = remote_backend(self._settings)
        self._mailbox.send(f"{relay}/weights", SubscribeVersions(name, backend))
        self._link = self._fleet.open_link(name, 0, SILENCE_S, backend)
        try:
            receive_versions(self._link, self._version_store, relay, self._stop.is_set, lambda _: None)
        finally:
            self._link.close()
