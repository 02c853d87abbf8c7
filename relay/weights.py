"""The clients' side of the weights: the trainer publishes versions, a rollout reads the newest.

`WeightPublisher.publish` returns after one copy into host memory; a thread does the rest, so no relay can stall the trainer.
If a version is published before the one before it has begun to leave, the newer takes its place; one that has begun to
leave is finished first. `WeightReader` reads a relay's segment where they share the host; elsewhere the relay feeds it.
"""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..comm.errors import LinkBroken, PeerGone, WaitTimeout, WrongDigest
from ..comm.fleet import Fleet, Member
from ..comm.segment import Segment
from ..comm.settings import CommSettings
from ..comm.waits import waiting
from .archive import Archive
from .chain import chain_order
from .feed import Feed, fetch
from .frames import Offer
from .layout import Layout, host_buffer
from .parts import Part, Ranges
from .push import LinkPush, Parcel, ShmPush, is_shared, open_push
from .versions import Held, NothingReadable, Shelf
from .wire import IDLE_S

_log = logging.getLogger(__name__)
_CLOSE_S = 15.0


class Receipt(NamedTuple):
    """Proof of the weights held; a publisher's has no digest yet, since it is computed off the trainer's path."""

    version: int
    step: int
    digest: str


class WeightPublisher:
    """The trainer's end: hands versions over to a thread, which pushes them to the head of the relays' chain.

    With several actor ranks each has a publisher of its `part`, and all publish the same versions.
    """

    def __init__(self, fleet: Fleet, layout: Layout, settings: CommSettings, part: Part | None = None) -> None:
        self.layout = layout
        self.num_superseded = 0
        """Versions that were never sent because a newer one was published first."""
        self._part = part or Part.whole(layout)
        self._fleet = fleet
        self._settings = settings
        self._mailbox = fleet.post.open(f"{fleet.name}/weights")
        self._changed = threading.Condition()
        self._spare: list[np.ndarray] = []
        self._waiting: Parcel | None = None
        self._is_sending = False
        self._is_slot_out = False
        """A version is being written into a claimed slot, or waits there: nobody may claim the slot again."""
        self._closed = False
        self._failure: Exception | None = None
        self._way: ShmPush | LinkPush | None = None
        self._head = ("", 0)
        """The relay that took the last version."""
        self._last: Parcel | None = None
        self._shunned: dict[tuple[str, int], float] = {}
        """Relays that did not take a version, and until when others are asked first."""
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, step: int, tensors: Mapping[str, Tensor]) -> Receipt:
        """Copy the tensors (cast to the layout's dtype) and return; the copy is the trainer's whole stall.

        Raises what ended the publisher's thread, if something has.
        """
        if self._failure is not None:
            raise self._failure
        parcel = self._parcel(version, step)
        self._part.write(tensors, parcel.buffer)
        with self._changed:
            self._waiting = parcel
            self._changed.notify_all()
        return Receipt(version, step, "")

    def close(self) -> None:
        """Wait until what was published has reached a relay, as long as there is one; then end the thread."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._waiting is None and not self._is_sending) or not self._relays(), _CLOSE_S
            )
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        self._mailbox.close()

    def _parcel(self, version: int, step: int) -> Parcel:
        """Where the next version is written: the slot claimed for it, else memory of this process."""
        layout, spans = self.layout, () if self._part.num_parts == 1 else self._part.ranges.spans
        offer = Offer(
            version, step, layout.num_bytes, layout.fingerprint, self._part.num_parts, self._part.index, spans
        )
        with self._changed:
            assert not self._closed, "the publisher is closed"
            if self._waiting is not None:
                superseded, self._waiting = self._waiting, None
                self.num_superseded += 1
                if superseded.is_in_slot:
                    return Parcel(offer, self._part, superseded.buffer, superseded.claim, is_in_slot=True)
                self._spare.append(superseded.buffer)
            if self._way is not None and (claim := self._way.claimed()) is not None:
                self._is_slot_out = True
                return Parcel(offer, self._part, self._way.slot(claim), claim, is_in_slot=True)
            buffer = self._spare.pop() if self._spare else host_buffer(self._part.num_bytes)
            return Parcel(offer, self._part, buffer)

    def _relays(self) -> list[Member]:
        """Those that may take a version, in the chain's order, the shunned ones last."""
        relays, now = chain_order(self._fleet.living("relay", having="segment")), time.monotonic()
        return sorted(relays, key=lambda m: self._shunned.get((m.name, m.incarnation), now) > now)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the border of the thread: the trainer is told at its next publish
            _log.error("%s: the publisher ended: %s", self._fleet.name, str(error))
            with self._changed:
                self._failure, self._waiting, self._is_sending = error, None, False
                self._changed.notify_all()
        finally:
            self._last = None
            self._drop_way()

    def _serve(self) -> None:
        """Push what was published. Waits for `publish`, then for a relay; woken by `publish`, `close` and letters."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed, IDLE_S)
                if self._waiting is None and self._closed:
                    break
                parcel, self._waiting = self._waiting, None
                self._is_sending = parcel is not None
                if parcel is not None and not parcel.is_in_slot and self._way is not None:
                    # Nobody else may write into the claimed slot from here on, so it is this parcel's.
                    parcel.claim = self._way.claimed()
            if parcel is not None:
                self._push(parcel)
                with self._changed:
                    self._is_slot_out = self._is_slot_out and not parcel.is_in_slot
                    if self._last is not None and not self._last.is_in_slot:
                        self._spare.append(self._last.buffer)
                    self._last = parcel
                    self._is_sending = False
                    self._changed.notify_all()
            self._prepare()

    def _push(self, parcel: Parcel) -> None:
        """Bring one version to a relay, whichever takes it first; given up only for a newer one or at the close."""
        tried: set[tuple[str, int]] = set()
        while not self._closed:
            relay = next((m for m in self._relays() if (m.name, m.incarnation) not in tried), None)
            if relay is None:
                tried.clear()
                if self._waiting is not None:
                    self.num_superseded += 1
                    return
                time.sleep(0.05)
                continue
            try:
                self._way_to(relay).push(parcel)
                self._head = (relay.name, relay.incarnation)
                return
            except (LinkBroken, PeerGone, WaitTimeout) as error:
                _log.warning("version %d did not reach %s: %s", parcel.offer.version, relay.name, str(error))
                tried.add((relay.name, relay.incarnation))
                self._shun(relay)
                parcel = parcel.moved()  # the slot lies with the relay that is gone

    def _prepare(self) -> None:
        """Between two versions: keep the way to the head of the chain open, and its next slot claimed.

        A new head may have missed what the one before had taken and not yet sent on, so it is brought the last version.
        """
        relays = self._relays()
        try:
            if relays:
                if self._last is not None and self._head != (relays[0].name, relays[0].incarnation):
                    self._push(self._last.moved())
                way = self._way_to(relays[0])
                way.keep_alive()
                if not self._is_slot_out:
                    way.claim_ahead(self._part)
        except (LinkBroken, PeerGone, WaitTimeout) as error:
            _log.info("%s: the way to %s broke: %s", self._fleet.name, relays[0].name, str(error))
            self._shun(relays[0])

    def _shun(self, relay: Member) -> None:
        """Until the fleet has found out whether it lives; wrongly shunned, it misses versions for that long."""
        self._shunned[relay.name, relay.incarnation] = time.monotonic() + self._settings.expiry_s
        self._drop_way()

    def _way_to(self, relay: Member) -> ShmPush | LinkPush:
        way = self._way
        if way is None or (way.relay.name, way.relay.incarnation) != (relay.name, relay.incarnation):
            self._drop_way()
            self._way = way = open_push(relay, self._fleet, self._mailbox, self._settings)
        return way

    def _drop_way(self) -> None:
        with self._changed:
            if self._way is not None:
                self._way.close()
                self._way = None


class WeightReader:
    """A rollout's end: the newest complete version of the relay nearest to it."""

    def __init__(
        self, fleet: Fleet, layout: Layout, settings: CommSettings, archive: Archive | None = None, tp_rank: int = 0
    ) -> None:
        """`archive` has what no relay holds any more; of a layout for several ranks, `tp_rank` takes its ranges alone."""
        self.layout = layout
        self._ranges = Ranges(layout.spans_of(tp_rank))
        self._fleet = fleet
        self._settings = settings
        self._archive = archive
        self._relay = fleet.nearest("relay", having="segment")
        self._feed: Feed | None = None
        if is_shared(self._relay, fleet, settings):
            self._segment = Segment.open(self._relay.info["segment"])
        else:
            self._segment = Segment.create_anonymous(f"{fleet.name} weights")
            self._feed = Feed(fleet, self._segment, settings)
        self._shelf = Shelf(self._segment)
        self._check: Future[None] | None = None
        self._checked: Held | None = None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix=f"{fleet.name} digest")

    def newest(self) -> int | None:
        """The newest complete version; None before the first. A few reads of memory.

        A version seen for the first time is checked against its digest on another core meanwhile, so that `pull` need not.
        """
        if (held := self._shelf.newest_held()) is None:
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
            wait.until(lambda: self._shelf.newest() is not None)
        self.layout.check(self._shelf.fingerprint, self._relay.name)
        for _ in range(3):
            if self._check is not None:
                self._check.result()
            if (checked := self._checked) is not None and checked == self._shelf.newest_held():
                held, _ = self._shelf.read_by(lambda source: self._take(source, into))
                if held == checked:
                    return Receipt(held.version, held.step, held.digest)
                continue
            held, digest = self._shelf.read_by(lambda source: self._copy(source, into))
            if digest == held.digest:
                return Receipt(held.version, held.step, held.digest)
            _log.warning("version %d of %s has not its digest", held.version, self._relay.name)
        raise WrongDigest(f"the bytes of {self._relay.name} have not the digest of the version that it shows")

    def pull_version(self, version: int, into: np.ndarray) -> Receipt:
        """Copy one version, which need not be the newest, from any relay that still holds it, else from the archive.

        Raises `NothingReadable` if nobody has it, `WrongDigest` if the archive has something else under its name.
        """
        try:
            held, digest = self._shelf.read_by(lambda source: self._copy(source, into), version)
            if digest == held.digest:
                return Receipt(held.version, held.step, held.digest)
        except NothingReadable:
            _log.info("version %d is not held by %s: asking the others", version, self._relay.name)
        whole = into if into.nbytes == self.layout.num_bytes else np.empty(self.layout.num_bytes, np.uint8)
        found = fetch(self._fleet, version, whole, self._settings)
        if found is None and self._archive is not None:
            found = self._archive.read(version, self.layout, whole)
        if found is None:
            raise NothingReadable(f"version {version} is held by no relay, and there is no archive of checkpoints")
        if whole is not into:
            self._take(whole, into)
        return Receipt(version, *found)

    def close(self) -> None:
        """End the feed if there is one, and let go of the memory."""
        if self._feed is not None:
            self._feed.close()
        self._hasher.shutdown()
        self._segment.close()

    def _check_ahead(self, held: Held) -> None:
        """The bytes of a generation stay what they are: checked once, they are right for every copy of that generation."""
        is_right = self.layout.num_bytes == self._segment.slot_bytes
        if is_right and self.layout.digest(self._segment.slot(held.slot)) == held.digest and self._shelf.is_still(held):
            self._checked = held

    def _copy(self, source: np.ndarray, into: np.ndarray) -> str:
        """Copy, and digest the source on another core meanwhile: one copy of everything runs twice as fast as pieces."""
        digest = self._hasher.submit(self.layout.digest, source)
        self._take(source, into)
        return digest.result()

    def _take(self, source: np.ndarray, into: np.ndarray) -> None:
        for at, start, end in self._ranges.pieces(0, self.layout.num_bytes):
            np.copyto(into[at : at + end - start], source[start:end])
