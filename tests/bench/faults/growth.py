"""Do the processes of a run grow? Samples of memory, open files and threads by role, over all incarnations of a role."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..harness import Measurement
from .processes import Usage, processes_of, usage_of

_PERIOD_S = 2.0
_WARM_S = 20.0
"""Age from which a process counts: younger ones are still importing and filling their caches."""
_FEWEST = 9


class Growth:
    """Takes samples at most every `_PERIOD_S`; a third of them is compared with the first third."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._sampled_at = 0.0
        self._first_seen: dict[int, float] = {}
        self._samples: dict[str, list[Usage]] = defaultdict(list)

    def sample(self) -> None:
        """Take a sample of each warm process, if it is time."""
        now = time.monotonic()
        if now - self._sampled_at < _PERIOD_S:
            return
        self._sampled_at = now
        for process in processes_of(self._address).values():
            first_seen = self._first_seen.setdefault(process.pid, now)
            usage = usage_of(process.pid) if now - first_seen >= _WARM_S else None
            if usage is not None:
                self._samples[process.name].append(usage)

    def rows(self) -> Iterator[Measurement]:
        """The growth of each role."""
        for name, samples in sorted(self._samples.items()):
            if len(samples) >= _FEWEST and name not in ("helper", "failure-report"):
                yield from growth_rows(name, samples)


def growth_rows(name: str, samples: Sequence[Usage]) -> Iterator[Measurement]:
    """A row each for memory, files and threads: the median of the last third of the samples over that of the first."""
    third = len(samples) // 3
    for field, unit in (("megabytes", "MB"), ("files", "files"), ("threads", "threads")):
        values = [float(getattr(usage, field)) for usage in samples]
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        growth = last / max(first, 1.0)  # the guardian of reward processes has no open file
        yield Measurement(f"{name} {field}", "its first third", last, unit, growth)
