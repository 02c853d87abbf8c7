"""A version in a slot as a source to send from: it reads the store's segment through an opening of its own, and writes nothing."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...comm.errors import LinkBroken
from ...comm.messages.weights import Offer
from ...comm.shared_memory import Lock

if TYPE_CHECKING:
    from .delta import Difference
    from .incoming import IncomingVersion
    from .slots import SlotWrite, StoredVersion, VersionSlots


class SlotSource:
    """A version that is complete or still arriving; its slot is locked for reading as soon as it is complete."""

    def __init__(
        self,
        slots: "VersionSlots",
        held: "StoredVersion | SlotWrite",
        digest: str,
        difference: "Difference | None",
        incoming: "IncomingVersion | None",
        is_closed: Callable[[], bool],
    ) -> None:
        """`slots` belong to the caller's own opening of the segment; `incoming` is None for a complete version."""
        self.offer = Offer(held.version, slots.segment.slot_bytes, slots.fingerprint)
        self.difference = difference
        self._slots = slots
        self._slot = held.slot
        self._generations = (held.generation, held.generation + (incoming is not None))
        self._digest = digest
        self._incoming = incoming
        self._is_closed = is_closed
        self._is_locked = False
        self._buffer = slots.segment.slot(held.slot)

    def bytes_at(self, at: int, start: int, end: int) -> np.ndarray:
        return self._buffer[start:end]

    def bytes_ready(self, beyond: int, timeout_s: float) -> int:
        return self.offer.num_bytes if self._incoming is None else self._incoming.wait_bytes_ready(beyond, timeout_s)

    def digest(self, timeout_s: float) -> str | None:
        return self._digest if self._incoming is None else self._incoming.wait_digest(timeout_s)

    def is_valid(self) -> bool:
        """False once the slot holds something else; raises `LinkBroken` when the store is closed."""
        if self._is_closed():
            raise LinkBroken("this relay ends")
        if self._incoming is not None and self._incoming.is_abandoned:
            return False
        if not self._is_locked and (self._incoming is None or not self._incoming.is_open):
            self._is_locked = self._slots.segment.try_lock(self._slot, Lock.SHARED)
        return self._slots.generation(self._slot) in self._generations

    def close(self) -> None:
        if self._is_locked:
            self._slots.segment.unlock(self._slot, Lock.SHARED)
            self._is_locked = False
