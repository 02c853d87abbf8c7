"""The clients' side of the weights: the trainer publishes versions, a rollout reads the newest.

`WeightPublisher.publish` returns after one copy into host memory; a thread does the rest, so no relay can stall the trainer.
If a version is published before the one before it has begun to leave, the newer takes its place; one that has begun to
leave is finished first. `WeightReader` reads a relay's segment where they share the host; elsewhere the relay feeds it, and
versions are staged in memory of its own while the generator goes on.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..comm.errors import HeadraceError, LinkBroken, PeerGone, WaitTimeout, WrongDigest
from ..comm.fleet import Fleet, Member
from ..comm.links import Link
from ..comm.messages import FeedWanted, PartFilled, PushEnded, SlotGranted, SlotWanted
from ..comm.segment import Segment
from ..comm.settings import CommSettings
from ..comm.waits import waiting
from .carrier import take_versions
from .chain import chain_order, dial
from .desk import Desk
from .keeper import remote_backend
from .layout import Layout, digest_of_ranges
from .versions import Held, Shelf
from .wire import IDLE_S, SILENCE_S, Offer, send_cargo, send_idle

_log = logging.getLogger(__name__)
_REPEAT_S = 1.0  # a request for a slot is repeated until answered: the relay may have come back meanwhile
_CLOSE_S = 15.0


class Receipt(NamedTuple):
    """Proof of the weights held; a publisher's has no digest yet, since it is computed off the trainer's path."""

    version: int
    step: int
    digest: str


@dataclass(slots=True)
class _Parcel:
    """A published version in host memory of this process, complete from the start."""

    offer: Offer
    buffer: np.ndarray
    computed: str = ""

    def arrived(self, beyond: int, timeout_s: float) -> int:
        """All of it."""
        return self.offer.num_bytes

    def digest(self, timeout_s: float) -> str:
        """Computed when it is first asked for."""
        self.computed = self.computed or digest_of_ranges(self.buffer, [(0, self.buffer.nbytes)])
        return self.computed

    def is_still(self) -> bool:
        """It stays until it was sent."""
        return True


class WeightPublisher:
    """The trainer's end: hands versions over to a thread, which pushes them to the head of the relays' chain."""

    def __init__(self, fleet: Fleet, layout: Layout, settings: CommSettings) -> None:
        self.layout = layout
        self.num_superseded = 0
        """Versions that were never sent because a newer one was published first."""
        self._fleet = fleet
        self._settings = settings
        self._mailbox = fleet.post.open(f"{fleet.name}/weights")
        self._changed = threading.Condition()
        self._spare = [np.zeros(layout.num_bytes, np.uint8)]
        self._waiting: _Parcel | None = None
        self._is_sending = False
        self._closed = False
        self._link: tuple[Member, Link] | None = None
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, step: int, tensors: Mapping[str, Tensor]) -> Receipt:
        """Copy the tensors (cast to the layout's dtype) and return; the copy is the trainer's whole stall."""
        with self._changed:
            assert not self._closed, "the publisher is closed"
            if self._waiting is not None:  # it has not begun to leave: the newer takes its place
                self._spare.append(self._waiting.buffer)
                self._waiting = None
                self.num_superseded += 1
            buffer = self._spare.pop() if self._spare else np.zeros(self.layout.num_bytes, np.uint8)
        self.layout.write(tensors, buffer)
        with self._changed:
            self._waiting = _Parcel(Offer(version, step, self.layout.num_bytes, self.layout.fingerprint), buffer)
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

    def _relays(self) -> list[Member]:
        return chain_order(self._fleet.living("relay", having="segment"))

    def _run(self) -> None:
        """Push what was published. Waits for `publish`, then for a relay; woken by `publish`, `close` and letters."""
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed, IDLE_S)
                parcel, self._waiting = self._waiting, None
                self._is_sending = parcel is not None
            if parcel is None:
                self._keep_alive()
                continue
            self._push(parcel)
            with self._changed:
                self._spare.append(parcel.buffer)
                self._is_sending = False
                self._changed.notify_all()
        self._drop_link()

    def _push(self, parcel: _Parcel) -> None:
        """Bring one version to a relay, whichever takes it first; given up only for a newer one or at the close."""
        shunned: set[tuple[str, int]] = set()
        while not self._closed:
            relays = self._relays()
            relay = next((m for m in relays if (m.name, m.incarnation) not in shunned), None)
            if relay is None:
                shunned.clear()
                if self._waiting is not None:
                    self.num_superseded += 1
                    return
                time.sleep(0.05)
                continue
            try:
                self._push_to(relay, parcel)
                return
            except (LinkBroken, PeerGone, WaitTimeout) as error:
                _log.warning("version %d did not reach %s: %s", parcel.offer.version, relay.name, error)
                shunned.add((relay.name, relay.incarnation))

    def _push_to(self, relay: Member, parcel: _Parcel) -> None:
        if (segment := shared_segment(relay, self._fleet, self._settings)) is not None:
            try:
                self._write(relay, segment, parcel)
            finally:
                segment.close()
            return
        if self._link is None or self._link[0] != relay:
            self._drop_link()
            backend = remote_backend(self._settings)
            self._link = relay, dial(self._fleet, self._mailbox, relay.name, backend, SILENCE_S)
        try:
            send_cargo(self._link[1], parcel, SILENCE_S)
        except LinkBroken:
            self._drop_link()
            raise

    def _write(self, relay: Member, segment: Segment, parcel: _Parcel) -> None:
        """Through shared memory: ask for the slot, write it, have it checked."""
        offer = parcel.offer
        wanted = SlotWanted(offer.version, offer.step, offer.num_bytes, offer.fingerprint, num_parts=1)
        answer = self._ask(relay, wanted, offer.version)
        if isinstance(answer, SlotGranted):
            np.copyto(segment.slot(answer.slot), parcel.buffer)
            filled = PartFilled(offer.version, 0, [(0, offer.num_bytes)], parcel.digest(0))
            answer = self._ask(relay, filled, offer.version)
        if isinstance(answer, PushEnded) and answer.refusal:
            _log.warning("%s refused version %d: %s", relay.name, offer.version, answer.refusal)

    def _ask(self, relay: Member, question: SlotWanted | PartFilled, version: int) -> SlotGranted | PushEnded:
        wanted = PushEnded if isinstance(question, PartFilled) else SlotGranted | PushEnded
        with waiting(relay.name, f"its answer on version {version}", self._settings.deadline_s) as wait:
            while not self._closed and relay.name in {m.name for m in self._relays()}:
                self._mailbox.send(f"{relay.name}/weights", question)
                until = time.monotonic() + _REPEAT_S
                while (left := until - time.monotonic()) > 0:
                    letter = self._mailbox.receive(min(left, 0.1))
                    if letter is not None and isinstance(letter.message, wanted) and letter.message.version == version:
                        return letter.message
                wait.check()
        raise PeerGone(f"{relay.name} is gone")

    def _keep_alive(self) -> None:
        if self._link is not None:
            try:
                send_idle(self._link[1], SILENCE_S)
            except LinkBroken:
                self._drop_link()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link[1].close()
            self._link = None


def shared_segment(relay: Member, fleet: Fleet, settings: CommSettings) -> Segment | None:
    """The relay's segment if it is to be used and lies on this host."""
    if settings.link not in ("auto", "shm") or relay.host != fleet.me.host:
        return None
    return Segment.open(relay.info["segment"])


class WeightReader:
    """A rollout's end: the newest complete version of the relay nearest to it."""

    def __init__(self, fleet: Fleet, layout: Layout, settings: CommSettings) -> None:
        self.layout = layout
        self._relay = fleet.nearest("relay", having="segment")
        self._feed: _Feed | None = None
        segment = shared_segment(self._relay, fleet, settings)
        if segment is None:
            segment = Segment.create_anonymous(f"{fleet.name} weights")
            self._feed = _Feed(fleet, segment, settings)
        self._segment = segment
        self._shelf = Shelf(segment)

    def newest(self) -> int | None:
        """The newest complete version; None before the first. Two reads of memory."""
        return self._shelf.newest()

    def pull(self, into: np.ndarray, deadline_s: float) -> Receipt:
        """Copy the newest version into `into`, uint8 [layout.num_bytes], and check its digest.

        Waits for a relay's first version if there is none yet; raises `WaitTimeout` past the deadline, `WrongDigest` if the
        relay serves another layout or its bytes are still wrong the third time.
        """
        with waiting(self._relay.name, "a first version", deadline_s) as wait:
            wait.until(lambda: self._shelf.newest() is not None)
        self.layout.check(self._shelf.fingerprint, self._relay.name)
        held = Held(-1, -1, "", -1, -1)
        for _ in range(3):
            held = self._shelf.read(into)
            if self.layout.digest(into) == held.digest:
                return Receipt(held.version, held.step, held.digest)
            _log.warning("version %d of %s has not its digest", held.version, self._relay.name)
        raise WrongDigest(f"version {held.version} of {self._relay.name} does not have the digest {held.digest}")

    def close(self) -> None:
        """End the feed if there is one, and let go of the memory."""
        if self._feed is not None:
            self._feed.close()
        self._segment.close()


class _Feed:
    """Versions fed over a link into a segment of this process, by whichever relay is nearest and alive."""

    def __init__(self, fleet: Fleet, segment: Segment, settings: CommSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._desk = Desk(segment)
        self._mailbox = fleet.post.open(f"{fleet.name}/weights")
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
        self._desk.close()
        self._mailbox.close()

    def _run(self) -> None:
        """Take in versions. Waits for a living relay and its link; woken by frames, and by the clock when it has none."""
        while not self._stop.is_set():
            relays = self._fleet.living("relay", having="segment")
            if not relays:
                self._stop.wait(self._settings.heartbeat_s)
                continue
            relay = relays[self._fleet.me.index % len(relays)]
            name = f"{relay.name}>{self._fleet.name} {self._fleet.incarnation}.{time.monotonic_ns()}"
            backend = remote_backend(self._settings)
            try:
                self._mailbox.send(f"{relay.name}/weights", FeedWanted(name, backend))
                self._link = self._fleet.open_link(name, 0, SILENCE_S, backend)
                take_versions(self._link, self._desk, relay.name, self._stop.is_set, lambda _: None)
            except HeadraceError as error:
                if not self._stop.is_set():
                    _log.warning("%s: the feed from %s broke: %s", self._fleet.name, relay.name, error)
            finally:
                if self._link is not None:
                    self._link.close()
