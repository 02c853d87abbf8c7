"""The trainer's side of the weights: it publishes versions.

`WeightPublisher.publish` returns after one copy into memory of this process; the thread of a `Chain` does the rest, so no relay
can stall the trainer. A version that has not begun to leave is superseded by the next one; one that has begun is finished first.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.fleet import Fleet
from ...comm.messages.weights import Offer
from ...comm.recipe import CommSettings
from ...comm.shared_memory import Segment, pin
from .byte_ranges import join_digests
from .chain import Chain
from .layout import Layout, WeightShard
from .version_store import VersionSource

_CLOSE_S = 15.0
_POLL_S = 0.1


class WeightPublisher:
    """The trainer's end of the chain, which hands versions to the head of the relays.

    With several actor ranks each has a publisher of its `part`, and all publish the same versions, as the same incarnation of
    the trainer: rank 0's.
    """

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        settings: CommSettings,
        part: WeightShard | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.layout = layout
        self._fleet = fleet
        self._versions = PublishedVersions(part or WeightShard.whole(layout), incarnation or fleet.incarnation)
        self._chain = Chain(fleet, self._versions.next_source, settings, self._versions.segment.path)

    def start(self) -> "WeightPublisher":
        """Start the thread that sends, if it does not run yet; `publish` does so too."""
        self._chain.start()
        return self

    @property
    def failure(self) -> SettingError | None:
        return self._chain.failure

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors (cast to the layout's dtype) to host memory and return; that is the trainer's whole stall.

        Raises `SettingError` if the settings allow no way to a relay.
        """
        self.start()
        if self._chain.failure is not None:
            raise self._chain.failure
        self._versions.write(version, tensors)

    def close(self) -> None:
        """Wait until the last version has reached a relay, as long as one lives; then end the thread."""
        self._versions.wait_sent(
            lambda: self._chain.failure is None and bool(self._fleet.alive_members("relay", having="segment"))
        )
        self._versions.close()
        self._chain.close()


class PublishedVersions:
    """The memory of one rank: the newest version and, while the one before still leaves, that one. One lock guards all of it."""

    def __init__(self, part: WeightShard, incarnation: int) -> None:
        self.segment = Segment.create_anonymous("weights to publish")
        self._part = part
        self._incarnation = incarnation
        self._changed = threading.Condition()
        self._buffers: list[np.ndarray] = []
        self._newest: Offer | None = None
        self._leaving: int | None = None
        """The slot that is being sent, which must not be written."""
        self._sent = -1
        """The version that the present head of the relays has."""
        self._closed = False

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to a slot that does not leave: they are the newest version."""
        assert not self._closed, "the publisher is closed"
        with self._changed:
            slot = 1 if self._leaving == 0 else 0
            self._newest = None if self._newest is not None and self._newest.slot == slot else self._newest
        while len(self._buffers) <= slot:
            self.segment.allocate(len(self._buffers) + 1, self._part.num_bytes)
            self._buffers.append(buffer := self.segment.slot(len(self._buffers)))
            pin(buffer)
        self._part.write(tensors, self._buffers[slot])
        with self._changed:
            self._newest = self._part.offer(version, self._incarnation, slot)
            self._changed.notify_all()

    def next_source(self, above: int, timeout_s: float) -> VersionSource | None:
        """The newest version if it is above `above`, which is the one that this end of the link has sent last."""
        with self._changed:
            self._sent = above
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._is_waiting, timeout_s)
            offer = self._newest
            if offer is None or self._closed or not self._is_waiting:
                return None
            self._leaving = offer.slot
            buffer = self._buffers[offer.slot]
            digest = _digest_within(self._part.chunk_digests(buffer))
            return VersionSource(offer, buffer, lambda *_: buffer.nbytes, digest, lambda: True, self._end_leaving)

    @property
    def _is_waiting(self) -> bool:
        return self._newest is not None and self._newest.version > self._sent

    def _end_leaving(self) -> None:
        with self._changed:
            self._leaving = None

    def wait_sent(self, has_relay: Callable[[], bool]) -> None:
        """Wait until the newest version has been sent, as long as there is a relay."""
        until = time.monotonic() + _CLOSE_S
        with self._changed:
            while self._is_waiting and has_relay() and time.monotonic() < until:
                self._changed.wait(_POLL_S)

    def close(self) -> None:
        """Send nothing more and give the memory back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._buffers.clear()
        self.segment.close()


def _digest_within(chunks: Iterator[bytes]) -> Callable[[float], str | None]:
    """Joins the digests of chunks, which it makes when it is asked; each call goes on where the time of the one before ended."""
    digests: list[bytes] = []

    def digest(timeout_s: float) -> str | None:
        until = time.monotonic() + timeout_s
        for chunk in chunks:
            digests.append(chunk)
            if time.monotonic() > until:
                return None
        return join_digests(digests)

    return digest
