"""The memory of a storage unit: a memfd that every process on the unit's host reads and writes directly.

Bytes move by `pwritev` and `preadv`, so the columns of a row are written in one call without being joined first.
"""

import bisect
import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import StorageFull
from ..memfd import HEAD_BYTES, create_memory, path_of

ALIGN = 64
"""Blocks start at multiples of this, in the arena and in a reader's buffer."""
_SPARE_BYTES = 512 << 20
_BUFFERS_PER_CALL = 1024  # IOV_MAX of Linux


def round_up(num_bytes: int) -> int:
    """The next multiple of `ALIGN`; at least one `ALIGN`, so that no two blocks share a place."""
    return max(-(-num_bytes // ALIGN), 1) * ALIGN


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the host's, or the least that a control group (version 1 or 2) allows it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, group = line.split(":", 2)  # version 2 names no controllers
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        folder = Path(group.lstrip("/"))
        # An outer group's limit binds too. A container may see its own group at the root of the mount.
        for outer in (folder, *folder.parents):
            path = root / "sys/fs/cgroup" / mount / outer / name
            if path.is_file() and (limit := path.read_text().strip()).isdigit():  # or "max"
                limits.append(int(limit))
    return min(limits)


class ArenaFile:
    """An open file descriptor of an arena's memfd: reads and writes bytes at offsets."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Write uint8 buffers one after the other from `offset` on. Raises `StorageFull` when the host is out of memory."""
        pending = [buffer.data for buffer in buffers if buffer.nbytes]
        first = 0
        while first < len(pending):
            try:
                written = os.pwritev(self._fd, pending[first : first + _BUFFERS_PER_CALL], offset)
            except OSError as error:
                raise StorageFull(f"{error}: lower queue.lead, or add relays") from error
            offset += written
            while first < len(pending) and written >= len(pending[first]):
                written -= len(pending[first])
                first += 1
            if written:
                pending[first] = pending[first][written:]

    def read(self, offset: int, into: np.ndarray) -> None:
        """Fill a uint8 buffer from `offset` on; beyond the arena's end the buffer stays as it is."""
        view = into.data
        while len(view) and (num_bytes := os.preadv(self._fd, [view], offset)):
            view = view[num_bytes:]
            offset = offset + num_bytes

    def close(self) -> None:
        """Close the descriptor; the last one frees the memory. Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Arena(ArenaFile):
    """The owner's descriptor and its allocator: first fit, neighbouring holes merge. One thread at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(create_memory("headrace rows"))
        self.path = path_of(self._fd, os.getpid(), self._fd)
        """For `open_memory` in other processes of the host."""
        self._capacity_bytes = capacity_bytes
        self._end = self._high_water = HEAD_BYTES
        self._holes: list[tuple[int, int]] = []
        """Offset and bytes of each free range below `_end`, by offset."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        return self._end - HEAD_BYTES - sum(size for _, size in self._holes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the host's memory that the arena takes."""
        return os.fstat(self._fd).st_blocks * 512

    def reserve(self, num_bytes: int) -> int:
        """The offset of `num_bytes` reserved bytes; raises `StorageFull`."""
        size = round_up(num_bytes)
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        if self._end + size > self._capacity_bytes:
            raise StorageFull(
                f"a storage unit of {self._capacity_bytes >> 20} MiB has no room for {num_bytes} bytes more: "
                "lower queue.lead, or add relays"
            )
        offset = self._end
        self._end = self._end + size
        self._high_water = max(self._high_water, self._end)
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Free what `reserve(num_bytes)` gave; memory beyond the last reserved byte goes back to the host."""
        size = round_up(num_bytes)
        index = bisect.bisect(self._holes, (offset, 0))
        if index < len(self._holes) and self._holes[index][0] == offset + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == offset:
            index -= 1
            offset, room = self._holes.pop(index)
            size += room
        if offset + size < self._end:
            self._holes.insert(index, (offset, size))
            return
        self._end = offset
        # Writing pages again costs a third of new pages, so some are kept.
        if self._high_water - self._end > max(_SPARE_BYTES, self._end):
            self._high_water = self._end + _SPARE_BYTES
            self._give_back(self._high_water)

    def _give_back(self, start: int) -> None:
        """Return the pages behind `start` to the host; the file keeps its length, and they read as zeros."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = os.fstat(self._fd).st_size
        # Pages that the host does not take are kept for the next rows.
        with contextlib.suppress(OSError):
            if start < end:
                with mmap.mmap(self._fd, end - start, offset=start) as pages:
                    pages.madvise(mmap.MADV_REMOVE)
