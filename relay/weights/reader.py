"""A rollout's side of the weights: it reads the newest version, from a relay's segment where they share the host; elsewhere the
relay feeds it.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...comm.errors import WrongDigest
from ...comm.fleet import Fleet
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment
from ...comm.waits import waiting
from .checkpoint_source import CheckpointSource
from .layout import Layout
from .mirror import WeightMirror, fetch_version
from .push import is_shared
from .shards import ByteRanges
from .slots import Receipt, StoredVersion, VersionNotAvailable, VersionSlots

_log = logging.getLogger(__name__)


class WeightReader:
    """A rollout's end: the newest complete version of the relay nearest to it."""

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        settings: CommSettings,
        checkpoint_source: CheckpointSource | None = None,
        tp_rank: int = 0,
    ) -> None:
        """`checkpoint_source` has what no relay holds any more; of a layout for several ranks, `tp_rank` takes its ranges alone."""
        self.layout = layout
        self._ranges = ByteRanges(layout.spans_of(tp_rank))
        self._fleet = fleet
        self._settings = settings
        self._checkpoint_source = checkpoint_source
        self._relay = fleet.nearest("relay", having="segment")
        self._mirror: WeightMirror | None = None
        if is_shared(self._relay, fleet, settings):
            self._segment = Segment.open(self._relay.info["segment"])
        else:
            self._segment = Segment.create_anonymous(f"{fleet.name} weights")
            self._mirror = WeightMirror(fleet, self._segment, settings)
        self._slots = VersionSlots(self._segment)
        self._check: Future[None] | None = None
        self._checked: StoredVersion | None = None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix=f"{fleet.name} digest")

    def newest(self) -> int | None:
        """The newest complete version; None before the first. A few reads of memory.

        A version seen for the first time is checked against its digest on another core meanwhile, so that `pull` need not.
        """
        if (held := self._slots.newest_stored()) is None:
            return None
        if self._checked != held and (self._check is None or self._check.done()):
            self._check = self._hasher.submit(self._check_ahead, held)
        return held.version

    def pull(self, into: np.ndarray, deadline_s: float) -> Receipt:
        """Copy the newest version into `into`, uint8 of all bytes that this rank takes, and check its digest.

        Waits for a relay's first version if there is none yet; raises `WaitTimeout` past the deadline, `WrongDigest` if the
        relay serves another layout or its bytes are still wrong the third time.
        """
        with waiting(self._relay.name, "a first version", deadline_s) as wait:
            wait.until(lambda: self._slots.newest() is not None)
        self.layout.check(self._slots.fingerprint, self._relay.name)
        for _ in range(3):
            if self._check is not None:
                self._check.result()
            if (checked := self._checked) is not None and checked == self._slots.newest_stored():
                held, _ = self._slots.read_with(lambda source: self._take(source, into))
                if held == checked:
                    return Receipt(held.version, held.digest)
                continue
            held, digest = self._slots.read_with(lambda source: self._copy(source, into))
            if digest == held.digest:
                return Receipt(held.version, held.digest)
            _log.warning("version %d of %s has not its digest", held.version, self._relay.name)
        raise WrongDigest(f"the bytes of {self._relay.name} have not the digest of the version that it shows")

    def pull_version(self, version: int, into: np.ndarray) -> Receipt:
        """Copy one version, which need not be the newest, from any relay that still holds it, else from the archive.

        Raises `VersionNotAvailable` if nobody has it, `WrongDigest` if the archive has something else under its name.
        """
        try:
            held, digest = self._slots.read_with(lambda source: self._copy(source, into), version)
            if digest == held.digest:
                return Receipt(held.version, held.digest)
        except VersionNotAvailable:
            _log.info("version %d is not held by %s: asking the others", version, self._relay.name)
        whole = into if into.nbytes == self.layout.num_bytes else np.empty(self.layout.num_bytes, np.uint8)
        found = fetch_version(self._fleet, version, whole, self._settings)
        if found is None and self._checkpoint_source is not None:
            found = self._checkpoint_source.read(version, self.layout, whole)
        if found is None:
            raise VersionNotAvailable(f"version {version} is held by no relay, and there is no archive of checkpoints")
        if whole is not into:
            self._take(whole, into)
        return Receipt(version, found)

    def close(self) -> None:
        """End the feed if there is one, and let go of the memory."""
        if self._mirror is not None:
            self._mirror.close()
        self._hasher.shutdown()
        self._segment.close()

    def _check_ahead(self, stored: StoredVersion) -> None:
        """The bytes of a generation stay what they are: checked once, they are right for every copy of that generation."""
        is_right = self.layout.num_bytes == self._segment.slot_bytes
        if (
            is_right
            and self.layout.digest(self._segment.slot(stored.slot)) == stored.digest
            and self._slots.is_valid(stored)
        ):
            self._checked = stored

    def _copy(self, source: np.ndarray, into: np.ndarray) -> str:
        """Copy, and digest the source on another core meanwhile: one copy of everything runs twice as fast as pieces."""
        digest = self._hasher.submit(self.layout.digest, source)
        self._take(source, into)
        return digest.result()

    def _take(self, source: np.ndarray, into: np.ndarray) -> None:
        for at, start, end in self._ranges.chunks(0, self.layout.num_bytes):
            np.copyto(into[at : at + end - start], source[start:end])
