"""Virtual time: a heap of events, and the clocks that read it.

A rollout's clock runs ahead of the heap: a turn of its loop begins at the time of its event, and passes the time of its work
on a clock of its own; its next turn is an event at the end of it. So its messages leave when its work is done, and those that
arrive meanwhile wait for its next turn, as in a process that sleeps. There is one trainer: its clock handles the events of the
others while it waits. A simulation has threads: one of them runs at a time, and only while the world waits for it, so a run repeats itself.
"""

import heapq
import itertools
import math
import threading
from collections.abc import Callable

from ...comm.clock import Clock

_TURN_S = 3600.0
"""Longest real time between two turns of a thread: the run of which it is a part has been forgotten."""


class World:
    """Events in the order of their times, which are emulated seconds; of one moment, the first planned comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.threads: list[VirtualThread] = []
        """Those that have started and not ended, in the order of their start."""
        self.current: VirtualThread | None = None
        """The thread that runs; None while the world handles an event."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Call `act` at a moment that has not passed."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), act))

    def run_until(self, is_done: Callable[[], bool], until: float = math.inf) -> None:
        """Let the world go on until something is true or it is that moment. A thread of the world waits for it meanwhile.

        Raises `AssertionError` at the end of the heap.
        """
        if self.current is not None:
            self.current.wait(is_done, until)
            return
        while not is_done() and self.now < until:
            self._advance(until)

    def run_to(self, moment: float) -> None:
        """Handle the events before a moment, and let it be that moment."""
        self.run_until(lambda: False, moment)

    def _advance(self, until: float) -> None:
        """Let a thread run whose wait is over, or handle the next event, or let it be the first moment that someone waits for."""
        now, moment = self.now, until
        for thread in self.threads:
            wakes_at = thread.until
            if (frozen_until := thread.process.frozen_until) > now:
                wakes_at = frozen_until if thread.is_ready() else max(wakes_at, frozen_until)
            elif wakes_at <= now or thread.is_ready():
                thread.resume()
                return
            if wakes_at < moment:  # noqa: PLR1730 - `min` takes a tenth of the time of a simulation
                moment = wakes_at
        if self._events and self._events[0][0] < moment:
            self.now, _, act = heapq.heappop(self._events)
            self.num_events += 1
            act()
            return
        assert moment < math.inf, (
            f"nothing is left to happen after {self.now:.1f} emulated seconds: the run stands still"
        )
        self.now = max(now, moment)


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
        for lock in (self._may_go, self._has_stopped):
            lock.acquire(blocking=False)
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
        self._take(self._may_go)
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
            self._take(self._may_go)
        if self.process.is_dead:
            raise Killed

    def resume(self) -> None:
        """Let it run until it waits again or ends; raises its error. Called by the world."""
        before, self._world.current = self._world.current, self
        self._may_go.release()
        self._take(self._has_stopped)
        self._world.current = before
        if self._has_ended:
            self._world.threads.remove(self)
            if self._error is not None:
                raise self._error

    def _take(self, turn: "threading.Lock") -> None:
        """Wait for this thread's turn, or for its end."""
        assert turn.acquire(timeout=_TURN_S), f"{self.name} waits for its turn for {_TURN_S:.0f} s"

    def is_alive(self) -> bool:
        return self.ident is not None and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self._world.now + timeout
        self._world.run_until(lambda: self._has_ended, until)


class WorldClock(Clock):
    """The time of the world; `speed` emulated seconds are one second, as in a real run."""

    def __init__(self, world: World, speed: float) -> None:
        super().__init__(speed)
        self._world = world

    def now(self) -> float:
        return self._world.now

    def seconds(self) -> float:
        return self.now() / self.speed

    def wall(self) -> float:
        return self.seconds()

    def sleep_until(self, moment: float) -> float:
        late = self.now() - moment
        self._world.run_to(moment)
        return max(0.0, late)


class OwnClock(WorldClock):
    """The time of a process that may be ahead of the world: its sleep returns at once, later."""

    def __init__(self, world: World, speed: float) -> None:
        super().__init__(world, speed)
        self._ahead = 0.0

    def now(self) -> float:
        return max(self._ahead, self._world.now)

    def sleep_until(self, moment: float) -> float:
        late = self.now() - moment
        self._ahead = max(self._ahead, moment)
        return max(0.0, late)
