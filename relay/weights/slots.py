"""Weight versions in the slots of a segment: one arriving, the others readable, and no reading ever torn.

A version is readable only from `complete` on, when its bytes are there and have been checked. While a slot is written its
generation is odd; a reader leases the slot, copies, and looks at the generation again. A lease keeps the slot from being
the next to be written as long as there is another, and for `LEASE_S` when there is none: nobody waits for a frozen reader,
whose copy the generation then gives away.

Header words: layout fingerprint, newest slot + 1, then for each slot generation, version, digest (two words).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from ...comm.errors import HeadraceError, WrongDigest
from ...comm.shared_memory import Lock, Segment

T = TypeVar("T")

NUM_SLOTS = 3
READER_LOCK_S = 2.0
"""How long a writer waits for readers that lease all slots."""
_LAYOUT, _NEWEST = 0, 1
_FIRST_SLOT, _SLOT_WORDS = 8, 8
_GENERATION, _VERSION, _DIGEST = 0, 1, 2


class Receipt(NamedTuple):
    """Proof of the weights held; a publisher's has no digest yet, since it is computed off the trainer's path."""

    version: int
    digest: str


class VersionNotAvailable(HeadraceError):
    """No complete version lies on the shelf."""


class StoredVersion(NamedTuple):
    """A complete version in a slot."""

    version: int
    digest: str
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """A slot that is being written, and for which version."""

    version: int
    slot: int
    generation: int
    buffer: np.ndarray
    owns_lock: bool


def choose_slot(stored: Sequence[StoredVersion | None], newest: int | None, locked: Sequence[bool]) -> int | None:
    """Which slot to write next: an empty one, else the oldest version's, never the newest's nor a leased one."""
    free = [i for i in range(len(stored)) if i != newest and not locked[i]]
    return min(free, key=lambda i: -1 if (h := stored[i]) is None else h.version, default=None)


class VersionSlots:
    """The versions of one segment. One thread writes; any number of processes and threads read."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the layout that the slots are for; 0 before `prepare`."""
        return int(self.segment.words[_LAYOUT])

    def prepare(self, num_bytes: int, fingerprint: int) -> None:
        """Give the segment its slots for a layout; with the same layout again this does nothing."""
        if self.fingerprint not in (0, fingerprint):
            raise WrongDigest(
                "the relay holds weights of another layout: is `model.path` or `model.dtype` not the same?"
            )
        if not self.fingerprint:
            self.segment.allocate(NUM_SLOTS, num_bytes)
            self.segment.slot(0)
            self.segment.words[_LAYOUT] = fingerprint

    # -------------------------------------------------------------------------------------------- the writer's side

    def begin(self, version: int, *, force: bool = False) -> SlotWrite | None:
        """A slot to write `version` into, without waiting; None while readers lease all that may be written.

        With `force` the oldest of those is taken: a reader finds its copy torn, and reads again.
        """
        newest = self.newest_stored()
        held = [self._stored(i) for i in range(NUM_SLOTS)]
        owned = [self.segment.try_lock(i, Lock.EXCLUSIVE) for i in range(NUM_SLOTS)]
        slot = choose_slot(held, newest.slot if newest else None, [not own for own in owned])
        for i, own in enumerate(owned):
            if own and i != slot:
                self.segment.unlock(i, Lock.EXCLUSIVE)
        if slot is None and force:
            slot = choose_slot(held, newest.slot if newest else None, [False] * NUM_SLOTS)
        if slot is None:
            return None
        words = self._slot(slot)
        words[_GENERATION] += 1 + words[_GENERATION] % 2
        return SlotWrite(version, slot, int(words[_GENERATION]), self.segment.slot(slot), owned[slot])

    def commit(self, write: SlotWrite, digest: str) -> None:
        """Make the version readable, and the newest if it is newer than the newest."""
        slot = self._slot(write.slot)
        assert slot[_GENERATION] == write.generation, f"slot {write.slot} was taken over"
        words = int(digest, 16).to_bytes(16, "little")
        slot[_DIGEST : _DIGEST + 2] = np.frombuffer(words, dtype=np.int64)
        slot[_VERSION] = write.version
        slot[_GENERATION] = write.generation + 1
        newest = self.newest_stored()
        if newest is None or write.version > newest.version:
            self.segment.words[_NEWEST] = write.slot + 1
        self._unlock(write)

    def abort(self, write: SlotWrite) -> None:
        """Give up an arriving version; its slot stays empty."""
        if self._slot(write.slot)[_GENERATION] == write.generation:
            self._slot(write.slot)[_VERSION] = -1
            self._unlock(write)

    def _unlock(self, write: SlotWrite) -> None:
        if write.owns_lock:
            self.segment.unlock(write.slot, Lock.EXCLUSIVE)

    # ------------------------------------------------------------------------------------------- the readers' side

    def newest(self) -> int | None:
        """The newest complete version; two reads of memory."""
        held = self.newest_stored()
        return None if held is None else held.version

    def newest_stored(self) -> StoredVersion | None:
        """The newest complete version and where it lies."""
        while (index := int(self.segment.words[_NEWEST]) - 1) >= 0:
            # The newest slot is never written: one that is not whole has stopped being the newest meanwhile.
            if (held := self._stored(index)) is not None:
                return held
        return None

    def complete_versions(self) -> list[StoredVersion]:
        """All complete versions, oldest first."""
        found = [h for i in range(NUM_SLOTS) if self.fingerprint and (h := self._stored(i)) is not None]
        return sorted(found)

    def find(self, version: int | None) -> StoredVersion | None:
        """A complete version, or the newest for None."""
        if version is None:
            return self.newest_stored()
        return next((h for h in self.complete_versions() if h.version == version), None)

    def is_valid(self, stored: StoredVersion) -> bool:
        """True while the slot holds what it held."""
        return self.generation(stored.slot) == stored.generation

    def generation(self, slot: int) -> int:
        """The slot's generation: odd while it is written."""
        return int(self._slot(slot)[_GENERATION])

    def read(self, into: np.ndarray, version: int | None = None) -> StoredVersion:
        """Copy a version (the newest for None) into a buffer, uint8 [num_bytes]. Raises `VersionNotAvailable`.

        What is returned was whole: a slot that was written during the copy is read again. Never waits for a writer.
        """
        return self.read_with(lambda source: np.copyto(into, source), version)[0]

    def read_with(self, copy: Callable[[np.ndarray], T], version: int | None = None) -> tuple[StoredVersion, T]:
        """The same with a way to copy of the caller's own; returns what that returned besides."""
        while (held := self.find(version)) is not None:
            is_leased = self.segment.try_lock(held.slot, Lock.SHARED)
            try:
                result = copy(self.segment.slot(held.slot))
            finally:
                if is_leased:
                    self.segment.unlock(held.slot, Lock.SHARED)
            if self.is_valid(held):
                return held, result
        raise VersionNotAvailable("no version yet" if version is None else f"version {version} is not held")

    def _stored(self, index: int) -> StoredVersion | None:
        slot = self._slot(index)
        generation = int(slot[_GENERATION])
        version, digest = int(slot[_VERSION]), slot[_DIGEST : _DIGEST + 2].tobytes()
        if generation == 0 or generation % 2 or version < 0 or generation != int(slot[_GENERATION]):
            return None
        return StoredVersion(version, f"{int.from_bytes(digest, 'little'):032x}", index, generation)

    def _slot(self, index: int) -> np.ndarray:
        start = _FIRST_SLOT + index * _SLOT_WORDS
        return self.segment.words[start : start + _SLOT_WORDS]
