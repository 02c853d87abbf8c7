"""The memory of a storage unit: a memfd that whoever is on its host reads and writes directly.

Bytes are moved by `pwritev` and `preadv`, not through a mapping: no page of it is ever mapped, so nobody is killed by a page
that was given back, and the columns of a row go down in one call without being joined first.
"""

import bisect
import os
import secrets
from collections.abc import Sequence

import numpy as np

from ..errors import PeerGone, StorageFull

MAGIC_BYTES = 64
_ALIGN = 64
_SPARE_BYTES = 512 << 20
_BUFFERS_PER_CALL = 1024  # IOV_MAX of Linux


def physical_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class ArenaFile:
    """One opening of an arena's memfd: bytes by their place."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @staticmethod
    def begin_receive(path: str, magic: bytes) -> "ArenaFile":
        """The arena at `path` of this host; raises `PeerGone` unless it begins with `magic`, so is the one that is meant."""
        try:
            file = ArenaFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise PeerGone(f"no arena at {path}: {error}") from error
        if os.pread(file._fd, MAGIC_BYTES, 0) != magic:
            file.close()
            raise PeerGone(f"{path} is another arena than the one announced")
        return file

    def write(self, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Write uint8 buffers one after the other from `offset` on. Raises `StorageFull` when the host has no memory left."""
        pending = [buffer.data for buffer in buffers if buffer.nbytes]
        first = 0
        while first < len(pending):
            try:
                written = os.pwritev(self._fd, pending[first : first + _BUFFERS_PER_CALL], offset)
            except OSError as error:
                raise StorageFull(f"{error}: lower queue.capacity, or add relays") from error
            offset += written
            while first < len(pending) and written >= len(pending[first]):
                written -= len(pending[first])
                first += 1
            if written:
                pending[first] = pending[first][written:]

    def read(self, offset: int, into: np.ndarray) -> None:
        """Fill a uint8 buffer from `offset` on; what lies beyond the arena's end leaves the buffer as it is."""
        view = into.data
        while len(view) and (num_bytes := os.preadv(self._fd, [view], offset)):
            view, offset = view[num_bytes:], offset + num_bytes

    def close(self) -> None:
        """Close this opening; the memory ends with the last."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Arena(ArenaFile):
    """The owner's opening: places are given out first fit and grow together again when they come back. One thread at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(os.memfd_create("headrace-rows"))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.magic = secrets.token_bytes(MAGIC_BYTES)
        self._capacity_bytes = capacity_bytes
        os.pwrite(self._fd, self.magic, 0)
        self._end = self._high_water = MAGIC_BYTES
        self._holes: list[int] = []
        self._hole_bytes: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are given out."""
        return self._end - MAGIC_BYTES - sum(self._hole_bytes.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the arena takes from its host."""
        return os.fstat(self._fd).st_blocks * 512

    def reserve(self, num_bytes: int) -> int:
        """A place for `num_bytes`; raises `StorageFull`."""
        size = _round_up(num_bytes)
        for index, place in enumerate(self._holes):
            if (room := self._hole_bytes[place]) >= size:
                del self._holes[index], self._hole_bytes[place]
                if room > size:
                    self._holes.insert(index, place + size)
                    self._hole_bytes[place + size] = room - size
                return place
        if self._end + size > self._capacity_bytes:
            raise StorageFull(
                f"a storage unit of {self._capacity_bytes >> 20} MiB has no room for {num_bytes} bytes more: "
                "lower queue.capacity, or add relays"
            )
        place, self._end = self._end, self._end + size
        self._high_water = max(self._high_water, self._end)
        return place

    def free(self, offset: int, num_bytes: int) -> None:
        """Take back what `reserve(num_bytes)` gave; memory beyond the last place in use goes back to the host."""
        size = _round_up(num_bytes)
        index = bisect.bisect_left(self._holes, offset)
        if index < len(self._holes) and self._holes[index] == offset + size:
            size += self._hole_bytes.pop(self._holes.pop(index))
        if index and self._holes[index - 1] + self._hole_bytes[self._holes[index - 1]] == offset:
            index -= 1
            offset = self._holes.pop(index)
            size += self._hole_bytes.pop(offset)
        if offset + size == self._end:
            self._end = offset
            self._trim()
        else:
            self._holes.insert(index, offset)
            self._hole_bytes[offset] = size

    def _trim(self) -> None:
        # Pages that are written again cost a third of new ones, so some are kept for what comes next.
        if self._high_water - self._end > max(_SPARE_BYTES, self._end):
            self._high_water = self._end + _SPARE_BYTES
            os.ftruncate(self._fd, self._high_water)


def _round_up(num_bytes: int) -> int:
    return max(-(-num_bytes // _ALIGN), 1) * _ALIGN
