"""The clock of a run: the machine's, or that of a simulation in virtual time (`launch/lab/virtual`).

All processes of a host share its monotonic clock, so their readings fit on one time axis.
"""

import time


class Clock:
    """The machine's time."""

    def now(self) -> float:
        """Seconds since some moment, which never go back: those of measurements and deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """The wall clock's seconds since 1970."""
        return time.time()

    def sleep_until(self, moment: float) -> None:
        """Return at `moment` of this clock, or at once if it has passed."""
        if (left := moment - self.now()) > 0:
            time.sleep(left)


REAL_TIME = Clock()
