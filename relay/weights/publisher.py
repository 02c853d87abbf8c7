"""The trainer's side of the weights: it publishes versions.

`WeightPublisher.publish` returns after one copy into host memory; a thread does the rest, so no relay can stall the trainer.
If a version is published before the one before it has begun to leave, the newer takes its place; one that has begun to
leave is finished first.
"""

import logging
import threading
import time
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ...comm.errors import LinkBroken, PeerGone, WaitTimeout
from ...comm.fleet import Fleet, Member
from ...comm.messages.weights import Offer
from ...comm.recipe import CommSettings
from .chain import chain_order
from .layout import Layout, host_buffer
from .protocol import IDLE_S
from .push import LinkPush, PendingVersion, SharedMemoryPush, open_push
from .shards import WeightShard
from .slots import Receipt

_log = logging.getLogger(__name__)
_CLOSE_S = 15.0


class WeightPublisher:
    """The trainer's end: hands versions over to a thread, which pushes them to the head of the relays' chain.

    With several actor ranks each has a publisher of its `part`, and all publish the same versions.
    """

    def __init__(self, fleet: Fleet, layout: Layout, settings: CommSettings, part: WeightShard | None = None) -> None:
        self.layout = layout
        self._part = part or WeightShard.whole(layout)
        self._fleet = fleet
        self._settings = settings
        self._mailbox = fleet.open_mailbox(f"{fleet.name}/weights")
        self._changed = threading.Condition()
        self._spare: list[np.ndarray] = []
        self._waiting: PendingVersion | None = None
        self._is_sending = False
        self._is_slot_out = False
        """A version is being written into a claimed slot, or waits there: nobody may claim the slot again."""
        self._closed = False
        self._failure: Exception | None = None
        self._transport: SharedMemoryPush | LinkPush | None = None
        self._head = ("", 0)
        """The relay that took the last version."""
        self._last: PendingVersion | None = None
        self._suspected_until: dict[tuple[str, int], float] = {}
        """Relays that did not take a version, and until when others are asked first."""
        self._thread = threading.Thread(target=self._run, name=f"{fleet.name} publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Receipt:
        """Copy the tensors (cast to the layout's dtype) and return; the copy is the trainer's whole stall.

        Raises what ended the publisher's thread, if something has.
        """
        if self._failure is not None:
            raise self._failure
        publication = self._pending_version(version)
        self._part.write(tensors, publication.buffer)
        with self._changed:
            self._waiting = publication
            self._changed.notify_all()
        return Receipt(version, "")

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

    def _pending_version(self, version: int) -> PendingVersion:
        """Where the next version is written: the slot claimed for it, else memory of this process."""
        layout, spans = self.layout, () if self._part.num_parts == 1 else self._part.ranges.spans
        offer = Offer(version, layout.num_bytes, layout.fingerprint, self._part.num_parts, self._part.index, spans)
        with self._changed:
            assert not self._closed, "the publisher is closed"
            if self._waiting is not None:
                superseded, self._waiting = self._waiting, None
                if superseded.is_in_slot:
                    return PendingVersion(offer, self._part, superseded.buffer, superseded.reservation, is_in_slot=True)
                self._spare.append(superseded.buffer)
            if self._transport is not None and (claim := self._transport.take_reservation()) is not None:
                self._is_slot_out = True
                return PendingVersion(offer, self._part, self._transport.slot(claim), claim, is_in_slot=True)
            buffer = self._spare.pop() if self._spare else host_buffer(self._part.num_bytes)
            return PendingVersion(offer, self._part, buffer)

    def _relays(self) -> list[Member]:
        """Those that may take a version, in the chain's order, the shunned ones last."""
        relays, now = chain_order(self._fleet.alive_members("relay", having="segment")), time.monotonic()
        return sorted(relays, key=lambda m: self._suspected_until.get((m.name, m.incarnation), now) > now)

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
            self._close_transport()

    def _serve(self) -> None:
        """Push what was published. Waits for `publish`, then for a relay; woken by `publish`, `close` and letters."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed, IDLE_S)
                if self._waiting is None and self._closed:
                    break
                publication, self._waiting = self._waiting, None
                self._is_sending = publication is not None
                if publication is not None and not publication.is_in_slot and self._transport is not None:
                    # Nobody else may write into the claimed slot from here on, so it is this publication's.
                    publication.reservation = self._transport.take_reservation()
            if publication is not None:
                self._push(publication)
                with self._changed:
                    self._is_slot_out = self._is_slot_out and not publication.is_in_slot
                    if self._last is not None and not self._last.is_in_slot:
                        self._spare.append(self._last.buffer)
                    self._last = publication
                    self._is_sending = False
                    self._changed.notify_all()
            self._prepare()

    def _push(self, publication: PendingVersion) -> None:
        """Bring one version to a relay, whichever takes it first; given up only for a newer one or at the close."""
        tried: set[tuple[str, int]] = set()
        while not self._closed:
            relay = next((m for m in self._relays() if (m.name, m.incarnation) not in tried), None)
            if relay is None:
                tried.clear()
                if self._waiting is not None:
                    return
                time.sleep(0.05)
                continue
            try:
                self._transport_to(relay).push(publication)
                self._head = (relay.name, relay.incarnation)
                return
            except (LinkBroken, PeerGone, WaitTimeout) as error:
                _log.warning("version %d did not reach %s: %s", publication.offer.version, relay.name, str(error))
                tried.add((relay.name, relay.incarnation))
                self._suspect(relay)
                publication = publication.moved()  # the slot lies with the relay that is gone

    def _prepare(self) -> None:
        """Between two versions: keep the way to the head of the chain open, and its next slot claimed.

        A new head may have missed what the one before had taken and not yet sent on, so it is brought the last version.
        """
        relays = self._relays()
        try:
            if relays:
                if self._last is not None and self._head != (relays[0].name, relays[0].incarnation):
                    self._push(self._last.moved())
                way = self._transport_to(relays[0])
                way.keep_alive()
                if not self._is_slot_out:
                    way.reserve_next(self._part)
        except (LinkBroken, PeerGone, WaitTimeout) as error:
            _log.info("%s: the way to %s broke: %s", self._fleet.name, relays[0].name, str(error))
            self._suspect(relays[0])

    def _suspect(self, relay: Member) -> None:
        """Until the fleet has found out whether it lives; wrongly shunned, it misses versions for that long."""
        self._suspected_until[relay.name, relay.incarnation] = time.monotonic() + self._settings.expiry_s
        self._close_transport()

    def _transport_to(self, relay: Member) -> SharedMemoryPush | LinkPush:
        way = self._transport
        if way is None or (way.relay.name, way.relay.incarnation) != (relay.name, relay.incarnation):
            self._close_transport()
            self._transport = way = open_push(relay, self._fleet, self._mailbox, self._settings)
        return way

    def _close_transport(self) -> None:
        with self._changed:
            if self._transport is not None:
                self._transport.close()
                self._transport = None
