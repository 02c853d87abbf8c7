"""Weight versions in the slots of a segment: one arrives, the others are readable, and no read is ever torn.

A version is readable only after `commit`, once its bytes are in place and were checked. While a slot is written its
generation is odd. A reader locks the slot, copies, and compares the generation afterwards. A reader's lock keeps the slot
from being written next, as long as another slot is free. When readers lock all slots, the writer takes one after
`READER_LOCK_S`: no writer waits for a frozen reader, and the generation shows such a reader that its copy is torn.

Header words: layout fingerprint, newest slot + 1, then for each slot generation, version, digest (two words), incarnation.
"""

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ...comm.errors import HeadraceError, WrongDigest
from ...comm.shared_memory import Lock, Segment, pin

T = TypeVar("T")

NUM_SLOTS = 3
READER_LOCK_S = 2.0
"""Seconds that a writer waits for readers that lock all slots."""
_LAYOUT = 0
_NEWEST = 1
_FIRST_SLOT = 8
_SLOT_WORDS = 8
_GENERATION = 0
_VERSION = 1
_DIGEST = 2
_INCARNATION = 4


class VersionNotAvailable(HeadraceError):
    """No complete version is stored, or not the one that was asked for."""


class StoredVersion(NamedTuple):
    """A version in a slot, without a digest while it is written; `incarnation` is that of the trainer which made it."""

    version: int
    digest: str
    slot: int
    generation: int
    incarnation: int = 1


def choose_slot(stored: Sequence[StoredVersion | None], newest: int | None, locked: Sequence[bool]) -> int | None:
    """The slot to write next: an empty one, else that of the oldest version; never the newest's nor a locked one."""
    free = [i for i in range(len(stored)) if i != newest and not locked[i]]
    return min(free, key=lambda i: -1 if (s := stored[i]) is None else s.version, default=None)


class VersionSlots:
    """The versions of one segment. One thread writes; any number of processes and threads read."""

    def __init__(self, segment: Segment, num_slots: int = NUM_SLOTS) -> None:
        self.segment = segment
        self._num_slots = num_slots
        self._pinned: list[np.ndarray] = []
        self._locked: set[int] = set()
        """The slots that are written under a lock; one that was taken from readers has none."""

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the slots' layout; 0 before `prepare`."""
        return int(self.segment.words[_LAYOUT])

    def prepare(self, num_bytes: int, fingerprint: int) -> None:
        """Allocate the slots for a layout, unless they have it, and map them. Raises `WrongDigest` for another layout."""
        if self.fingerprint not in (0, fingerprint):
            raise WrongDigest(
                "the memory has slots of another layout: is `model.path` or `model.dtype` not the same as before?"
            )
        is_new = not self.fingerprint
        if is_new:
            self.segment.allocate(self._num_slots, num_bytes)
        self.segment.slot(0)
        if is_new:
            self.segment.words[_LAYOUT] = fingerprint

    # -------------------------------------------------------------------------------------------- the writer's side

    def begin(
        self, version: int, incarnation: int = 1, *, force: bool = False, busy: Container[int] = ()
    ) -> StoredVersion | None:
        """A slot to write `version` into, without waiting; None while readers lock all that may be written.

        With `force` it takes the oldest of those: its readers find their copies torn, and read again. `busy` slots are not taken.
        """
        newest = self.newest_stored()
        indices = range(self.segment.num_slots)
        stored = [self._stored(i) for i in indices]
        owned = [self.segment.try_lock(i, Lock.EXCLUSIVE) for i in indices]
        slot = choose_slot(
            stored, newest.slot if newest else None, [not own or i in busy for i, own in enumerate(owned)]
        )
        for i, own in enumerate(owned):
            if own and i != slot:
                self.segment.unlock(i, Lock.EXCLUSIVE)
        if slot is None and force:
            slot = choose_slot(stored, newest.slot if newest else None, [i in busy for i in indices])
        if slot is None:
            return None
        words = self._slot(slot)
        words[_GENERATION] += 1 + words[_GENERATION] % 2
        if owned[slot]:
            self._locked.add(slot)
        return StoredVersion(version, "", slot, int(words[_GENERATION]), incarnation)

    def commit(self, write: StoredVersion, digest: str) -> None:
        """Make the version readable, and the newest if it is newer than the newest."""
        slot = self._slot(write.slot)
        assert slot[_GENERATION] == write.generation, f"slot {write.slot} was taken over"
        words = int(digest, 16).to_bytes(16, "little")
        slot[_DIGEST : _DIGEST + 2] = np.frombuffer(words, dtype=np.int64)
        slot[_VERSION] = write.version
        slot[_INCARNATION] = write.incarnation
        slot[_GENERATION] = write.generation + 1
        newest = self.newest_stored()
        if newest is None or write.version > newest.version:
            self.segment.words[_NEWEST] = write.slot + 1
        self._unlock(write)

    def abort(self, write: StoredVersion) -> None:
        """Abandon an arriving version; its slot stays empty."""
        if self._slot(write.slot)[_GENERATION] == write.generation:
            self._slot(write.slot)[_VERSION] = -1
            self._unlock(write)

    def keep(self, chosen: StoredVersion | None) -> None:
        """Give up all versions but one that is complete; it becomes the newest. None gives up all."""
        self.segment.words[_NEWEST] = 0 if chosen is None else chosen.slot + 1
        for index in range(self.segment.num_slots):
            if chosen is None or index != chosen.slot:
                self._slot(index)[_VERSION] = -1

    def free(self) -> None:
        """Give up all versions, and give their memory back to the host. Nothing may read or write them meanwhile."""
        self.keep(None)
        self.segment.words[_LAYOUT] = 0
        self._pinned = []
        self.segment.free()

    def pin(self) -> None:
        """Pin the slots for copies from a GPU, once, as long as these slots live."""
        if not self._pinned:
            self._pinned = [self.segment.slot(index) for index in range(self.segment.num_slots)]
            for buffer in self._pinned:
                pin(buffer)

    def _unlock(self, write: StoredVersion) -> None:
        if write.slot in self._locked:
            self._locked.remove(write.slot)
            self.segment.unlock(write.slot, Lock.EXCLUSIVE)

    # ------------------------------------------------------------------------------------------- the readers' side

    def newest(self) -> int | None:
        """The number of the newest complete version; a few reads of memory."""
        stored = self.newest_stored()
        return None if stored is None else stored.version

    def newest_stored(self) -> StoredVersion | None:
        while (index := int(self.segment.words[_NEWEST]) - 1) >= 0:
            # The newest slot is never written: one that is not complete has stopped being the newest meanwhile.
            if (stored := self._stored(index)) is not None:
                return stored
        return None

    def complete_versions(self) -> list[StoredVersion]:
        return sorted(s for i in range(self.segment.num_slots) if (s := self._stored(i)) is not None)

    def find(self, version: int | None) -> StoredVersion | None:
        """A complete version, or the newest for None."""
        if version is None:
            return self.newest_stored()
        return next((s for s in self.complete_versions() if s.version == version), None)

    def is_valid(self, stored: StoredVersion) -> bool:
        return self.generation(stored.slot) == stored.generation

    def generation(self, slot: int) -> int:
        """The slot's generation: odd while it is written."""
        return int(self._slot(slot)[_GENERATION])

    def read_with(self, copy: Callable[[np.ndarray], T], version: int | None = None) -> tuple[StoredVersion, T]:
        """Copy a version (the newest for None) from its slot, uint8 [num_bytes]; also returns the result of `copy`.

        The copy is never torn: a slot that was written meanwhile is read again. Never waits for a writer. Raises
        `VersionNotAvailable`.
        """
        while (stored := self.find(version)) is not None:
            is_locked = self.segment.try_lock(stored.slot, Lock.SHARED)
            try:
                result = copy(self.segment.slot(stored.slot))
            finally:
                if is_locked:
                    self.segment.unlock(stored.slot, Lock.SHARED)
            if self.is_valid(stored):
                return stored, result
        raise VersionNotAvailable("no version yet" if version is None else f"version {version} is not held")

    def _stored(self, index: int) -> StoredVersion | None:
        slot = self._slot(index)
        generation = int(slot[_GENERATION])
        version = int(slot[_VERSION])
        incarnation = int(slot[_INCARNATION])
        digest = slot[_DIGEST : _DIGEST + 2].tobytes()
        if generation == 0 or generation % 2 or version < 0 or generation != int(slot[_GENERATION]):
            return None
        return StoredVersion(version, f"{int.from_bytes(digest, 'little'):032x}", index, generation, incarnation)

    def _slot(self, index: int) -> np.ndarray:
        start = _FIRST_SLOT + index * _SLOT_WORDS
        return self.segment.words[start : start + _SLOT_WORDS]
