"""Named waits for another process or thread: the two sides, the thing waited for, the start and the deadline.

`waiting` registers a wait and bounds nothing by itself: its body calls `Wait.until` or `Wait.check`, which raise an error past
the deadline that names both sides and carries the Python stacks, or passes `Wait.remaining_s` on. `waited_seconds` adds up
the registered waits. `join_thread` waits for a thread that was told to end.
"""

import logging
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from . import threads
from .errors import WaitTimeout

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Wait:
    """One wait: `who` waits for `whom` to give `what`."""

    who: str
    whom: str
    what: str
    deadline_s: float
    since: float = field(default_factory=threads.seconds)

    def __str__(self) -> str:
        return f"{self.who} waits for {self.whom}, {self.what}, {self.elapsed_s:.0f} s"

    @property
    def elapsed_s(self) -> float:
        return threads.seconds() - self.since

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self.deadline_s - self.elapsed_s)

    def check(self) -> None:
        """Raise `WaitTimeout` once the deadline has passed."""
        if self.elapsed_s >= self.deadline_s:
            raise WaitTimeout(f"{self}\n{stacks()}")

    def until(self, ready: Callable[[], T | None], interval_s: float = 0.002) -> T:
        """Call `ready` until it returns something truthy, and return that."""
        while not (result := ready()):
            self.check()
            threads.sleep(min(interval_s, self.remaining_s))
        return result


_identity = f"process {sys.argv[0].rsplit('/', 1)[-1] or 'python'}"
_lock = threading.Lock()
_current: list[Wait] = []
_waited: dict[str, float] = defaultdict(float)


def set_identity(name: str) -> None:
    """Name this process in the messages of its waits, e.g. "rollout 3"."""
    global _identity
    _identity = name


@contextmanager
def waiting(whom: str, what: str, deadline_s: float) -> Iterator[Wait]:
    """Register a wait of this process for `what` from `whom`, of at most `deadline_s` seconds."""
    wait = Wait(_identity, whom, what, deadline_s)
    with _lock:
        _current.append(wait)
    try:
        yield wait
    finally:
        with _lock:
            _current.remove(wait)
            _waited[whom] += wait.elapsed_s


def waited_seconds() -> dict[str, float]:
    """Seconds waited so far, by the side waited for, waits under way included."""
    with _lock:
        seconds = dict(_waited)
        for wait in _current:
            seconds[wait.whom] = seconds.get(wait.whom, 0.0) + wait.elapsed_s
    return seconds


def join_thread(thread: threading.Thread, timeout_s: float) -> None:
    """Wait for a thread to end, at most `timeout_s`; logs its name if it does not. A thread that never started has ended."""
    if thread.ident is not None:
        thread.join(timeout_s)
    if thread.is_alive():
        _log.error("thread %s has not ended within %.0f s of its close; it is left behind", thread.name, timeout_s)


def stacks() -> str:
    """The Python stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
