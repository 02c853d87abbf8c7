"""Whether the kernel killed a process for memory, and what it held: SIGKILL alone does not say who sent it.

The kernel counts such kills for each cgroup and for the whole host. The supervisor looks at its counters and at the memory of its
children about once a second. A child that ends by SIGKILL while a counter has risen was killed for memory.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...comm.host_memory import cgroups, held_by, memory_bytes, number_in
from ..config.memory_advice import advice

LOOK_S = 1.0
"""Seconds between two checks."""
MEMORY_S = 10.0
"""Seconds for which a check is remembered: the kernel may take seconds to free a large process."""
_ELSEWHERE = "it holds little itself: leave memory free on this host, or start fewer ranks there (roles)"


class _Look(NamedTuple):
    at: float
    num_kills: int
    held: Mapping[str, int]
    """Resident bytes of each child."""


class MemoryKills:
    """The memory of one supervisor's children, and the kernel's counters of kills."""

    def __init__(self, files: Mapping[Path, str] | None = None) -> None:
        """`files` have a line `NAME COUNT` for each name that they map to; by default the kernel's own."""
        self._files = dict(_counters()) if files is None else files
        self._looks = deque[_Look]()
        self.peaks: dict[str, int] = {}
        """The most bytes that each child, or one before it of the same name, has held for itself."""
        self._shared: dict[tuple[str, int], int] = {}
        """The most that each process has shared."""

    def look(self, pids: Mapping[str, int]) -> None:
        """Record the present memory of the children with these process ids; at most once in `LOOK_S`."""
        now = time.monotonic()
        if self._looks and now - self._looks[-1].at < LOOK_S:
            return
        while self._looks and now - self._looks[0].at > MEMORY_S:
            self._looks.popleft()
        held = {name: held_by(pid) for name, pid in pids.items()}
        self._looks.append(_Look(now, self._num_kills(), {name: each.resident for name, each in held.items()}))
        for name, each in held.items():
            process = (name, pids[name])
            # A process that ends unmaps what it shares, of which its peak still speaks.
            self._shared[process] = max(self._shared.get(process, 0), each.shared)
            self.peaks[name] = max(self.peaks.get(name, 0), each.most_own(self._shared[process]))

    def explain(self, name: str, role: str) -> str:
        """How the kernel killed this child for memory; empty if it did not. For a child that SIGKILL has ended."""
        if not self._looks or self._num_kills() <= self._looks[0].num_kills:
            return ""
        held = max((look.held.get(name, 0) for look in self._looks), default=0)
        has = f"it held {held / 1e9:.2g} GB" if held >= 1e8 else f"it held {held / 1e6:.0f} MB"
        return (
            f"{name} was killed by the kernel for memory: {has} of this host's {memory_bytes() / 1e9:.3g} GB;"
            f" {f'set {words}' if (words := advice(role)) else _ELSEWHERE}"
        )

    def _num_kills(self) -> int:
        return sum(number_in(path, name) for path, name in self._files.items())


def _counters() -> Iterator[tuple[Path, str]]:
    yield Path("/proc/vmstat"), "oom_kill"
    for folder in cgroups():
        for name in ("memory.events", "memory.oom_control"):
            yield folder / name, "oom_kill"
