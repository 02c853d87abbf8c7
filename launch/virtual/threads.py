"""Threads in virtual time. One of them runs at a time, and only while the world waits for it: so a run repeats itself.

Each belongs to a process. The death of the process ends its threads where they wait, by an exception that no code catches.
"""

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from ...comm.threads import Threads
from .world import World

LEAST_SLEEP_S, LEAST_WAIT_S = 0.02, 1.0
"""Shortest sleep, and wait for a queue, of a thread that polls: shorter ones would cost much and show nothing."""


class Killed(BaseException):
    """Ends a thread of a process that was killed."""


class VirtualProcess:
    """One life of a process: its threads, and whether it is dead or frozen. `freeze` and `kill` may come at any wait."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.threads: list[VirtualThread] = []
        self.is_dead = False
        self.frozen_until = -math.inf

    def kill(self) -> None:
        """End it at once. Called by a thread of its own, this raises `Killed` at the thread's next wait."""
        self.is_dead = True
        for thread in [thread for thread in self.threads if thread.is_alive() and not thread.is_current]:
            thread.resume()


class VirtualThread(threading.Thread):
    """A thread of a process. It ends with the world's own thread, to which its error is raised."""

    def __init__(self, world: World, process: VirtualProcess, target: Callable[[], object], name: str) -> None:
        super().__init__(name=f"{process.name} {name}", daemon=True)
        self.process = process
        self._world = world
        self._work = target
        self._may_go, self._has_stopped = threading.Lock(), threading.Lock()
        self._may_go.acquire()
        self._has_stopped.acquire()
        self.is_ready: Callable[[], bool] = lambda: True
        """Whether what it waits for is there."""
        self.until = math.inf
        """When it stops waiting for that."""
        self._has_ended = False
        self._error: BaseException | None = None

    def start(self) -> None:
        super().start()
        self.process.threads.append(self)
        self._world.threads.append(self)

    def run(self) -> None:
        self._may_go.acquire()
        try:
            if not self.process.is_dead:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - `resume` raises it in the world's thread
            self._error = error
        self._has_ended = True
        self._has_stopped.release()

    @property
    def is_current(self) -> bool:
        return self._world.current is self

    def wait(self, is_ready: Callable[[], bool], until: float) -> None:
        """Let the world go on until something is true, or it is that moment; raises `Killed`. Called by the thread itself."""
        if not self.process.is_dead:
            self.is_ready, self.until = is_ready, until
            self._has_stopped.release()
            self._may_go.acquire()
        if self.process.is_dead:
            raise Killed

    def resume(self) -> None:
        """Let it run until it waits again or ends; raises its error. Called by the world."""
        before, self._world.current = self._world.current, self
        self._may_go.release()
        self._has_stopped.acquire()
        self._world.current = before
        if self._has_ended:
            self._world.threads.remove(self)
            if self._error is not None:
                raise self._error

    def is_alive(self) -> bool:
        return self.ident is not None and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self._world.now + timeout
        self._world.run_until(lambda: self._has_ended, until)


class VirtualThreads(Threads):
    """The threads of all processes of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def seconds(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.run_to(self._world.now + max(seconds, LEAST_SLEEP_S))

    def new_thread(self, target: Callable[[], object], name: str) -> threading.Thread:
        assert self._world.current is not None, f"no process starts the thread {name}"
        return VirtualThread(self._world, self._world.current.process, target, name)

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
