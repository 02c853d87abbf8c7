"""A link at the pace of a slow network."""

import time
from collections.abc import Callable

import numpy as np

from headrace.comm.links.base import Link

_CREDIT_S = 2e-3


class ThrottledLink:
    """A link that sends at most `bytes_per_s`: a slow network on a fast machine. Bytes arrive when the last has left."""

    def __init__(
        self,
        link: Link,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.backend = link.backend
        self.receive = link.receive
        self.close = link.close
        self._link = link
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._free_at = 0.0

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        now = self._now()
        # Sleep overshoots; the next piece may make up for the time that one came too late.
        self._free_at = max(self._free_at, now - _CREDIT_S) + buffer.nbytes / self._bytes_per_s
        self._sleep(max(0.0, self._free_at - now))
        self._link.send(buffer, deadline_s)
