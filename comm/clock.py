"""The clock of a run: the machine's, or that of a simulation in virtual time (`launch/lab/virtual`);
and times as people say them.

All processes of a host share its monotonic clock, so their readings fit on one time axis.
"""

import os
import time
from collections import deque

STARTED = "HEADRACE_STARTED"
"""Environment variable with the wall clock's time when the run was started; the launcher sets it, for all processes of its host."""


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


def duration(seconds: float) -> str:
    """A time as people say it, such as `2 h 5 min`, `4 min 10 s` or `9 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = {"h": hours, "min": minutes, "s": 0 if hours else rest}
    return " ".join(f"{number} {unit}" for unit, number in parts.items() if number) or "0 s"


def estimate(seconds: float) -> str:
    """As `duration`, in whole minutes from two minutes on."""
    return duration(seconds if seconds < 120 else 60 * round(seconds / 60))


class TimeLeft:
    """How long the steps that are left will take, from the mean of the last ones. A run's first step is left out: it warms up."""

    STEPS = 8

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._last: deque[float] | None = None

    def after(self, step: int, seconds: float) -> float | None:
        """Seconds from the end of `step` (counted from 0), which took `seconds`, to that of the last one; None after the first."""
        if self._last is None:
            self._last = deque(maxlen=self.STEPS)
            return None
        self._last.append(seconds)
        return (self._num_steps - 1 - step) * sum(self._last) / len(self._last)


def begin(*, is_new: bool = True) -> None:
    """The run starts now. is_new: also if a start is in the environment, such as that of a run which started this one."""
    if is_new or STARTED not in os.environ:
        os.environ[STARTED] = str(time.time())


def elapsed_s() -> float:
    """Seconds since the run was started; 0 where nobody has said when."""
    try:
        return max(0.0, time.time() - float(os.environ[STARTED]))
    except (KeyError, ValueError):
        return 0.0


def clock_text(seconds: float) -> str:
    """Such as `0:07`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
