"""The memory of this host: how much its processes may use, how much is free, and how much one process uses.

A container or a job of SLURM has its limit in a cgroup. Its own cgroup may have none while one above it has one, so all of them
are read, of both versions of cgroups.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN = Path("/proc/self/cgroup")
_LIMITS = (("memory.max", "memory.current", "inactive_file"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip
"""For each version of cgroups: the files with the limit and the use, and the name in `memory.stat` of reclaimable bytes."""


class HeldMemory(NamedTuple):
    """The present and peak memory of a process, in bytes."""

    resident: int
    own: int
    """Resident, without shared memory and without the pages of files, which other processes have too."""
    most_resident: int

    @property
    def shared(self) -> int:
        """Resident shared memory and pages of files."""
        return self.resident - self.own

    def most_own(self, most_shared: int) -> int:
        """The most that was its own, if `most_shared` was shared at that moment: the kernel keeps the peak of the sum alone."""
        return max(self.own, self.most_resident - most_shared)


def memory_bytes() -> int:
    """Bytes that the processes here may hold: the host's memory, or the lowest limit of a cgroup."""
    limits = [number_in(_MEMINFO, "MemTotal:") * 1024]
    for folder in cgroups():
        limits += [limit for limit, _ in _limits_of(folder)]
    return min(limits)


def free_bytes() -> int:
    """Bytes that a process may still take: what the kernel has available, or what is left below the limit of a cgroup."""
    free = number_in(_MEMINFO, "MemAvailable:") * 1024
    left = [free or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in cgroups():
        left += [max(0, limit - used) for limit, used in _limits_of(folder)]
    return min(left)


def held_by(pid: int) -> HeldMemory:
    """The memory of a process; zeros if it has ended."""
    status = Path(f"/proc/{pid}/status")
    own, files, shared, most = (
        1024 * number_in(status, f"{name}:") for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")
    )
    return HeldMemory(own + files + shared, own, most)


def give_back_heap() -> None:
    """Return the unused pages of this process's heap to the kernel.

    The C library keeps what was freed between two blocks that live. A program whose pieces have another size in each turn holds more and
    more of such pages: a trainer without a GPU used 5.7 GB instead of 1.9 GB after three steps. The call takes about as long as the kernel
    needs to free them. A library without it keeps them.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cgroups() -> Iterator[Path]:
    """The folders of this process's cgroup and of those above it, of the unified tree and of version 1's memory.

    In a container the path may not be seen; the root is the container's own then.
    """
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and "memory" not in controllers.split(","):
                continue
            for root in (_ROOT, _ROOT / "memory", _ROOT / "unified"):
                folder = root / path.lstrip("/")
                yield from (above for above in (folder, *folder.parents) if above != root and root in above.parents)
            yield _ROOT if number == "0" else _ROOT / "memory"


def number_in(path: Path, name: str) -> int:
    """The number after a name in a file of such lines; 0 without one."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return 0


def _limits_of(folder: Path) -> Iterator[tuple[int, int]]:
    """The limit of a cgroup, and the bytes in use that cannot be given back."""
    for limit, used, inactive in _LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            bound = int((folder / limit).read_text())
            held = 0
            with suppress(OSError, ValueError):
                held = int((folder / used).read_text()) - number_in(folder / "memory.stat", inactive)
            yield bound, held
