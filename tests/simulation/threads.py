"""Threads in virtual time. One of them runs at a time, and only while the world waits for it: so a run repeats itself.

Each belongs to a process. The death of the process ends its threads where they wait, by an exception that no code catches.
"""

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from headrace.comm.threads import Threads
from headrace.launch.lab.virtual.world import World

from .processes import VirtualThread

LEAST_SLEEP_S, LEAST_WAIT_S = 0.1, 1.0
"""Shortest sleep, and wait for a queue, of a thread that polls: shorter ones would cost much and show nothing."""


class VirtualThreads(Threads):
    """The threads of all processes of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def seconds(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.run_to(self._world.now + max(seconds, LEAST_SLEEP_S))

    def new_thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        starter = self._world.current
        assert isinstance(starter, VirtualThread), f"no process starts the thread {name}"
        return VirtualThread(self._world, starter.process, target, name)

    def new_queue(self) -> "queue.Queue[Any]":
        return VirtualQueue(self._world)

    def new_semaphore(self, value: int) -> threading.Semaphore:
        return VirtualSemaphore(self._world, value)


class VirtualQueue(queue.Queue[Any]):
    """A queue whose readers wait in virtual time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block and not self.queue:
            until = math.inf if timeout is None else self._world.now + max(timeout, LEAST_WAIT_S)
            items = self.queue
            self._world.run_until(lambda: bool(items), until)
        return super().get(block=False)


class VirtualSemaphore(threading.Semaphore):
    """A semaphore that is waited for in virtual time."""

    def __init__(self, world: World, value: int) -> None:
        super().__init__(value)
        self._world = world

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if super().acquire(blocking=False):
            return True
        if blocking:
            until = math.inf if timeout is None else self._world.now + max(timeout, LEAST_WAIT_S)
            self._world.run_until(lambda: self._value > 0, until)
        return super().acquire(blocking=False)

    __enter__ = acquire
