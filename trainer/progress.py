"""The console's lines while a trainer trains steps again from their saved rows (`recovery.py`)."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..comm.clock import estimate
from ..comm.disk import say
from ..comm.waits import join_thread
from .step_log import ROWS

TELL_S = 10.0
"""Seconds between two lines about the steps that are trained again; one step may take longer."""


@contextmanager
def progress(num_steps: int, source: str, *, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Print at once, and every `TELL_S`, how many of the steps after the state of `source` are done; the body calls the result after each.

    A thread prints the lines, since one step may take long.
    """
    started = time.monotonic()
    done_s = list[float]()
    is_over = threading.Event()

    def tell() -> None:
        """Waits for the end of the body."""
        while not is_over.wait(TELL_S):
            say(progress_line(done_s, num_steps))

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    if is_shown:
        say(f"training {num_steps} step{'s' * (num_steps > 1)} again from {ROWS}/, after {source}")
        thread.start()
    try:
        yield lambda: done_s.append(time.monotonic() - started)
    finally:
        is_over.set()
        join_thread(thread, TELL_S)


def progress_line(done_s: Sequence[float], num_steps: int) -> str:
    """The number of steps that are done again, and the time left for the others; `done_s` are the seconds until each was done."""
    num = len(done_s)
    line = f"training steps again: {num} of {num_steps}"
    if not num:
        return line
    left_s = done_s[-1] / num * (num_steps - num)
    return f"{line}, about {estimate(left_s)} left"


def behind_line(version: int, checkpoint: int, num_trained: int) -> str:
    """The line for a run that ends while steps are trained again, of which `version` are done."""
    return (
        f"the run ends after {version} of its {num_trained} steps were trained again; nothing is lost: run.resume=auto"
        f" continues after step {num_trained}, from {_start(checkpoint)} and {ROWS}/"
    )


def _start(checkpoint: int) -> str:
    return f"the checkpoint of step {checkpoint}" if checkpoint else "the initial weights"
