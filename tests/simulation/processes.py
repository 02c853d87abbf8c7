"""Processes in virtual time, and their threads. Only a simulation needs them, and the package greenlet.

A thread is a coroutine that switches back to the world each time it waits. So only one runs at a time, a run can be repeated exactly, and a
switch costs a microsecond. With threads of the operating system, switches took a third of a simulation's time.
"""

import math
import threading
from collections.abc import Callable

from greenlet import getcurrent, greenlet

from headrace.launch.lab.virtual.world import World


class Killed(BaseException):
    """Ends a thread of a process that was killed."""


class VirtualProcess:
    """One life of a process: its threads, and whether it is dead or frozen. `freeze` and `kill` may come at any wait."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.threads: list[VirtualThread] = []
        self.is_dead = False
        self.was_killed = False
        """Whether it ended without sending what it had still to send."""
        self.frozen_until = -math.inf

    def kill(self) -> None:
        """End it at once. Called by a thread of its own, this raises `Killed` at the thread's next wait."""
        self.is_dead = self.was_killed = True
        for thread in [thread for thread in self.threads if thread.is_alive() and not thread.is_current]:
            thread.resume()


class VirtualThread(threading.Thread):
    """A thread of a process, with the interface of those of the operating system. Its error is raised to the world."""

    def __init__(self, world: World, process: VirtualProcess, target: Callable[[], object], name: str) -> None:
        super().__init__(name=f"{process.name} {name}", daemon=True)
        self.process = process
        self._world = world
        self._work = target
        self._body = greenlet(self.run)
        self._resumer: greenlet | None = None
        """To whom it switches back: the world, or the thread that lets the world go on."""
        self.is_ready: Callable[[], bool] = lambda: True
        self.until = math.inf
        self._has_started = False
        self._has_ended = False
        self._error: BaseException | None = None

    def start(self) -> None:
        self._has_started = True
        self.process.threads.append(self)
        self._world.threads.append(self)

    def run(self) -> None:
        try:
            if not self.process.is_dead:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - `resume` raises it in the world
            self._error = error
        self._has_ended = True

    @property
    def frozen_until(self) -> float:
        return self.process.frozen_until

    @property
    def is_current(self) -> bool:
        return self._world.current is self

    def wait(self, is_ready: Callable[[], bool], until: float) -> None:
        """As `Waiter.wait`; raises `Killed` if the process is dead."""
        if not self.process.is_dead:
            self.is_ready, self.until = is_ready, until
            assert self._resumer is not None
            self._resumer.switch()
        if self.process.is_dead:
            raise Killed

    def resume(self) -> None:
        before, self._world.current = self._world.current, self
        self._resumer = self._body.parent = getcurrent()
        self._body.switch()
        self._world.current = before
        if self._has_ended:
            self._world.threads.remove(self)
            if self._error is not None:
                raise self._error

    @property
    def ident(self) -> int | None:
        return id(self) if self._has_started else None

    def is_alive(self) -> bool:
        return self._has_started and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self._world.now + timeout
        self._world.run_until(lambda: self._has_ended, until)
