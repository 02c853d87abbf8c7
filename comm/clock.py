"""The clock of a run's devices: real seconds, or emulated ones that pass faster.

All processes of a host share its monotonic clock, so their readings fit on one time axis.
"""

import time


class Clock:
    """Counts `speed` emulated seconds per second."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def seconds(self) -> float:
        """Seconds that do not pass faster: those of deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """The wall clock's seconds since 1970."""
        return time.time()

    def now(self) -> float:
        return self.seconds() * self.speed

    def sleep_until(self, moment: float) -> float:
        """Sleep until `moment` of this clock; returns by how many of its seconds the caller was late, 0 if it was in time."""
        left = moment - self.now()
        if left > 0:
            time.sleep(left / self.speed)
        return max(0.0, -left)


REAL_TIME = Clock()
