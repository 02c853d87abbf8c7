"""Virtual time: a heap of events, and the clocks that read it.

A rollout's clock runs ahead of the heap: a turn of its loop begins at the time of its event, and passes the time of its work
on a clock of its own; its next turn is an event at the end of it. So its messages leave when its work is done, and those that
arrive meanwhile wait for its next turn, as in a process that sleeps. There is one trainer: its clock handles the events of the
others while it waits.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from ....comm.clock import Clock


class Waiter(Protocol):
    """Code that runs when the world lets it, until it waits again."""

    is_ready: Callable[[], bool]
    """Whether what it waits for is there."""
    until: float
    """When it stops waiting for that."""

    @property
    def frozen_until(self) -> float:
        """Before that it does not run."""
        ...

    def wait(self, is_ready: Callable[[], bool], until: float) -> None:
        """Let the world go on until something is true, or it is that moment. Called by the thread itself."""
        ...

    def resume(self) -> None:
        """Let it run until it waits again or ends; raises its error. Called by the world."""
        ...


class World:
    """Events in the order of their times; of one moment, the first planned comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads: list[Waiter] = []
        """The threads that have started and not ended, in the order of their start."""
        self.current: Waiter | None = None
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
        now = self.now
        moment = until
        for thread in self.threads:
            wakes_at = thread.until
            if (frozen_until := thread.frozen_until) > now:
                wakes_at = frozen_until if thread.is_ready() else max(wakes_at, frozen_until)
            elif wakes_at <= now or thread.is_ready():
                thread.resume()
                return
            if wakes_at < moment:  # noqa: PLR1730 - `min` takes a tenth of the time of a simulation
                moment = wakes_at
        if self._events and self._events[0][0] < moment:
            self.now, _, act = heapq.heappop(self._events)
            act()
            return
        assert moment < math.inf, f"nothing is left to happen after {self.now:.1f} s: the run stands still"
        self.now = max(now, moment)


class WorldClock(Clock):
    """The time of the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def wall(self) -> float:
        return self.now()

    def sleep_until(self, moment: float) -> None:
        self._world.run_to(moment)


class OwnClock(WorldClock):
    """The time of a process that may be ahead of the world: its sleep returns at once, later."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._ahead = 0.0

    def now(self) -> float:
        return max(self._ahead, self._world.now)

    def sleep_until(self, moment: float) -> None:
        self._ahead = max(self._ahead, moment)
