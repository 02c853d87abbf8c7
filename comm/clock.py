"""The clock of a run's devices: seconds as they pass, or emulated ones that pass faster.

All processes of a host share its monotonic clock, so their readings can be laid on one time axis.
"""

import time


class Clock:
    """Counts `speed` emulated seconds per second."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def now(self) -> float:
        """The moment, in seconds of this clock."""
        return time.monotonic() * self.speed

    def sleep_until(self, moment: float) -> float:
        """Sleep until a moment of this clock; returns how many of its seconds late the caller was, 0 if in time."""
        left = moment - self.now()
        if left > 0:
            time.sleep(left / self.speed)
        return max(0.0, -left)
