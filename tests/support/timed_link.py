"""Links in memory on a clock of their own: clusters of any size and speed, computed instead of waited for.

A link takes `start_s` and `byte_s` for each byte of a piece and carries one piece after the other. A node's clock stands at
the arrival of what it received last; what it sends leaves then, or when the link is free.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headrace.comm.errors import LinkBroken


@dataclass(slots=True)
class Clock:
    """The time of one node, in seconds."""

    now: float = 0.0


@dataclass(slots=True)
class TimedLink:
    """One direction from the node whose clock is `near` to that of `far`. Nodes run one after the other, in one thread."""

    near: Clock
    far: Clock
    start_s: float
    byte_s: float
    backend: str = "timed"
    _free_at: float = 0.0
    _pieces: deque[tuple[float, np.ndarray]] = field(default_factory=deque)

    def send(self, buffer: np.ndarray, deadline_s: float = 0.0) -> None:
        """Send a piece; it arrives whole."""
        self._free_at = max(self._free_at, self.near.now) + self.start_s + buffer.nbytes * self.byte_s
        self._pieces.append((self._free_at, buffer.copy()))

    def receive(self, buffer: np.ndarray, deadline_s: float = 0.0) -> None:
        """Take the next piece; the far node's clock moves on to its arrival. Raises `LinkBroken` if nothing was sent."""
        if not self._pieces:
            raise LinkBroken("nothing was sent")
        arrival, piece = self._pieces.popleft()
        self.far.now = max(self.far.now, arrival)
        buffer[:] = piece

    def close(self) -> None:
        """Forget what is under way."""
        self._pieces.clear()
