"""The search of a plan: a climb over the knobs of a run, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import structs

Ladder = Sequence[int | None]
"""The values of a knob in order; None leaves the choice to the recipe."""
K = TypeVar("K", bound=msgspec.Struct)


class Knobs(msgspec.Struct, frozen=True):
    """The split of the devices, and the trajectories that a rollout decodes together."""

    rollouts: int
    max_running: int

    @property
    def settings(self) -> dict[str, int]:
        return {"roles.rollout": self.rollouts, "generator.max_running": self.max_running}


def climb(start: K, ladders: Mapping[str, Ladder], speed: Callable[[K], float], budget: int) -> K:
    """The fastest knobs of at most `budget` tried: from each best one to the neighbours on the ladder of one knob after the other."""
    speeds = {start: speed(start)}
    best = start
    is_better = True
    while is_better:
        is_better = False
        for name, ladder in ladders.items():
            at = ladder.index(getattr(best, name))
            for value in (*ladder[max(0, at - 1) : at], *ladder[at + 1 : at + 2]):
                tried = structs.replace(best, **{name: value})
                if tried not in speeds and len(speeds) < budget:
                    speeds[tried] = speed(tried)
            fastest = max(speeds, key=lambda knobs: speeds[knobs])
            is_better = is_better or fastest != best
            best = fastest
    return best
