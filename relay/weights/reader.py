"""A rollout's side of the weights: it reads the newest version from the segment of a relay on its host.

On a host without a relay, a mirror keeps a segment of this process filled over a link, while the generator runs.
"""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from ...comm.errors import HeadraceError, WrongDigest
from ...comm.fleet import Fleet, is_shared
from ...comm.links.base import Link
from ...comm.links.opening import remote_backend
from ...comm.mailbox import Mailbox
from ...comm.messages.weights import OpenPullLink, WeightsPulled
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from ...comm.waits import join_thread, waiting
from .byte_ranges import ByteRanges
from .layout import Layout
from .slots import StoredVersion, VersionNotAvailable, VersionSlots
from .transfer import SILENCE_S, VersionReceiver, receive_version
from .version_store import VersionStore

if TYPE_CHECKING:
    from .checkpoint_source import CheckpointSource

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
"""Seconds between two checks for a relay, as long as it is missing."""
_DIGEST_S = 600.0
"""Seconds within which a digest of all weights must be ready; only a suspended machine takes longer."""


class WeightReader:
    """A rollout's end: the newest complete version of the relay nearest to it."""

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        settings: CommSettings,
        checkpoint_source: "CheckpointSource | None" = None,
        tp_rank: int = 0,
    ) -> None:
        """`checkpoint_source` has the versions that no relay holds any more; `tp_rank` selects ranges of a shared layout."""
        self.layout = layout
        relay = fleet.nearest("relay", having="segment")
        self.relay = relay.name
        self.checked: StoredVersion | None = None
        """The last version whose bytes were checked ahead of a pull."""
        self._ranges = ByteRanges(layout.spans_of(tp_rank))
        self._fleet = fleet
        self._settings = settings
        self._checkpoint_source = checkpoint_source
        self._mirror: WeightMirror | None = None
        if is_shared(relay, fleet, settings):
            segment = Segment.open(relay.info["segment"])
        else:
            segment = Segment.create_anonymous(f"{fleet.name} weights")
            self._mirror = WeightMirror(fleet, segment, settings)
        self.slots = VersionSlots(segment)
        """The versions in memory that this process can read."""
        self._check: Future[None] | None = None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix=f"{fleet.name} digest")

    def newest(self) -> int | None:
        """The newest complete version; None before the first. A few reads of memory.

        Another thread checks the bytes of a version seen for the first time against its digest, so `pull` can skip that.
        """
        self._start_mirror()
        if (newest := self.slots.newest_stored()) is None:
            return None
        if self.checked != newest and (self._check is None or self._check.done()):
            self._check = self._hasher.submit(self._check_ahead, newest)
        return newest.version

    def pull(self, into: np.ndarray, deadline_s: float) -> WeightsPulled:
        """Copy the newest version into `into`, uint8 of all bytes that this rank takes, whose digest was checked ahead or is now.

        Waits for a relay's first version if it has none yet. Raises `WaitTimeout` past the deadline, `WrongDigest` if the
        relay serves another layout or its bytes are still wrong the third time.
        """
        self._start_mirror()
        with waiting(self.relay, "a first version", deadline_s) as wait:
            wait.until(lambda: self.slots.newest() is not None)
        self.layout.check(self.slots.fingerprint, self.relay)
        for _ in range(3):
            if self._check is not None:
                self._check.result(_DIGEST_S)
            if (checked := self.checked) is not None and checked == self.slots.newest_stored():
                stored, _ = self.slots.read_with(lambda source: self._take(source, into))
                if stored == checked:
                    return WeightsPulled(stored.version, stored.digest)
                continue
            stored, digest = self.slots.read_with(lambda source: self._copy(source, into))
            if digest == stored.digest:
                return WeightsPulled(stored.version, stored.digest)
            _log.warning("digest mismatch for version %d of %s; it is read again", stored.version, self.relay)
        raise WrongDigest(f"the newest version of {self.relay} does not match its digest")

    def pull_version(self, version: int, into: np.ndarray) -> WeightsPulled:
        """Copy one version, which need not be the newest, from any relay that still holds it, else from its checkpoint.

        Raises `VersionNotAvailable` if neither has it, `WrongDigest` if the checkpoint is not that version.
        """
        try:
            stored, digest = self.slots.read_with(lambda source: self._copy(source, into), version)
            if digest == stored.digest:
                return WeightsPulled(stored.version, stored.digest)
        except VersionNotAvailable:
            _log.info("%s does not hold version %d; the other relays are asked", self.relay, version)
        whole = into if into.nbytes == self.layout.num_bytes else np.empty(self.layout.num_bytes, np.uint8)
        found = fetch_version(self._fleet, version, whole, self._settings)
        if found is None and self._checkpoint_source is not None:
            found = self._checkpoint_source.read(version, self.layout, whole)
        if found is None:
            raise VersionNotAvailable(f"no relay holds version {version}, and this reader has no checkpoints")
        if whole is not into:
            self._take(whole, into)
        return WeightsPulled(version, found)

    def _start_mirror(self) -> None:
        """On a host without a relay, start to receive versions with the first call of `newest` or `pull`."""
        if self._mirror is not None:
            self._mirror.start()

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
        self._hasher.shutdown()
        self.slots.segment.close()

    def _check_ahead(self, stored: StoredVersion) -> None:
        # The bytes of one generation do not change: one check is good for every copy of that generation.
        if self.layout.num_bytes != self.slots.segment.slot_bytes:
            return
        digest = self.layout.digest(self.slots.segment.slot(stored.slot))
        if digest == stored.digest and self.slots.is_valid(stored):
            self.checked = stored

    def _copy(self, source: np.ndarray, into: np.ndarray) -> str:
        """Copy, while another core computes the digest: two whole passes at once are twice as fast as alternating pieces."""
        digest = self._hasher.submit(self.layout.digest, source)
        self._take(source, into)
        return digest.result(_DIGEST_S)

    def _take(self, source: np.ndarray, into: np.ndarray) -> None:
        for at, start, end in self._ranges.chunks(0, self.layout.num_bytes):
            np.copyto(into[at : at + end - start], source[start:end])


class WeightMirror:
    """Keeps a segment of this process filled with the versions of any living relay."""

    def __init__(self, fleet: Fleet, segment: Segment, settings: CommSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._version_store = VersionStore(segment)
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._stop = threading.Event()
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} weight mirror", daemon=True)

    def start(self) -> None:
        """Start to receive; a second call changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._link is not None:
            self._link.close()
        join_thread(self._thread, 2 * SILENCE_S)
        self._version_store.close()
        self._mailbox.close()

    def _run(self) -> None:
        """Receive versions. Waits for a living relay and its link; woken by frames, and by the clock when it has none."""
        turn = self._fleet.me.index
        while not self._stop.is_set():
            relays = self._fleet.alive_members("relay", having="segment")
            if not relays:
                self._stop.wait(_LOOK_S)
                continue
            try:
                self._receive_from(relays[turn % len(relays)].name)
            except HeadraceError as error:
                turn += 1
                if not self._stop.is_set():
                    _log.warning("%s: its link for weights broke; it tries the next relay: %s", self._fleet.name, error)

    def _receive_from(self, relay: str) -> None:
        self._link = _open_pull_link(self._fleet, self._mailbox, relay, self._settings)
        with closing(self._link):
            VersionReceiver(self._link, self._version_store, relay).run(self._stop.is_set, lambda _: None)


def fetch_version(fleet: Fleet, version: int, into: np.ndarray, settings: CommSettings) -> str | None:
    """Copy one version into a buffer, uint8 [num_bytes], from any relay that still holds it: its digest, or None."""
    with closing(fleet.open_mailbox(f"{fleet.name}/fetch")) as mailbox:
        for relay in fleet.alive_members("relay", having="segment"):
            try:
                with closing(_open_pull_link(fleet, mailbox, relay.name, settings, version)) as link:
                    if (digest := receive_version(link, into)) is not None:
                        return digest
            except HeadraceError as error:
                _log.warning("%s: version %d did not come from %s: %s", fleet.name, version, relay.name, str(error))
        return None


def _open_pull_link(
    fleet: Fleet, mailbox: Mailbox, relay: str, settings: CommSettings, version: int | None = None
) -> Link:
    """Open a link over which `relay` sends each new version, or one. Raises `LinkBroken`."""
    name = f"{relay}>{mailbox.name} {fleet.incarnation}.{time.monotonic_ns()}"
    mailbox.send(f"{relay}/weights", OpenPullLink(name, remote_backend(settings), version))
    return fleet.open_link(name, 0, SILENCE_S, remote_backend(settings))
