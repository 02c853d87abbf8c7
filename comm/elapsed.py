"""The time since a run was started, for the lines that processes print on its console."""

import os
import time

from .disk import say

STARTED = "HEADRACE_STARTED"
"""Environment variable with the wall clock's time when the run was started; the launcher sets it, for all processes of its host."""


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


def tell(text: str) -> None:
    """Print a line on the console, after the time since the run was started."""
    say(f"{clock_text(elapsed_s()):>7}  {text}")
