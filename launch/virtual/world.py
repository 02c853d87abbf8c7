"""Virtual time: a heap of events, and the clocks that read it.

A rollout's clock runs ahead of the heap: a turn of its loop begins at the time of its event, and passes the time of its work
on a clock of its own; its next turn is an event at the end of it. So its messages leave when its work is done, and those that
arrive meanwhile wait for its next turn, as in a process that sleeps. There is one trainer: its clock handles the events of the
others while it waits.
"""

import heapq
import itertools
from collections.abc import Callable

from ...comm.clock import Clock


class World:
    """Events in the order of their times, which are emulated seconds; of one moment, the first planned comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Call `act` at a moment that has not passed."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), act))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Handle events until something is true. Raises `AssertionError` at the end of the heap."""
        while not is_done():
            assert self._events, (
                f"nothing is left to happen after {self.now:.1f} emulated seconds: the run stands still"
            )
            self._next()

    def run_to(self, moment: float) -> None:
        """Handle the events before a moment, and let it be that moment."""
        while self._events and self._events[0][0] < moment:
            self._next()
        self.now = max(self.now, moment)

    def _next(self) -> None:
        self.now, _, act = heapq.heappop(self._events)
        self.num_events += 1
        act()


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
