"""Threads, their queues, and the time of waits: Python's own, or those of a simulation in virtual time (`launch/lab/virtual`).

Code that waits takes them from here. A simulation then runs it as it is, one thread at a time, in an order that it can repeat.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Threads:
    """Python's threads and the monotonic clock."""

    def seconds(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def new_thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def new_queue(self) -> "queue.Queue[Any]":
        return queue.Queue()

    def new_semaphore(self, value: int) -> threading.Semaphore:
        return threading.Semaphore(value)


_present = Threads()


def seconds() -> float:
    """The monotonic clock by which waits count."""
    return _present.seconds()


def sleep(seconds: float) -> None:
    """Let this thread sleep."""
    _present.sleep(seconds)


def new_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread, not started."""
    return _present.new_thread(target, name)


def new_queue() -> "queue.Queue[Any]":
    """An unbounded queue."""
    return _present.new_queue()


def new_semaphore(value: int) -> threading.Semaphore:
    """A semaphore that counts from `value`."""
    return _present.new_semaphore(value)


@contextmanager
def replaced_by(threads: Threads) -> Iterator[None]:
    """Within the body, all threads of this process come from `threads`."""
    global _present
    before = _present
    _present = threads
    try:
        yield
    finally:
        _present = before
