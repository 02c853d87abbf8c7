"""Advice on the balance of a run: if one role idles most of the time, which setting would help, and how much it would gain.

The gain is computed from the busy shares of the roles, as if work could be divided without loss. So it is an estimate and an upper bound.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...comm.environment import CORES, OVERLAP_CORES
from ...comm.recipe import Recipe
from ...relay.queue.schedules import schedule_of

IDLE = 0.5
"""Above this idle share a role idles most of the time."""
BUSY = 0.8
"""Below this busy share of both roles something else sets the pace, such as rewards, and no split of the devices would help."""
LEAST_GAIN = 1.1
USED = 0.9
"""Above this share of busy cores a host has no capacity left."""
WARM_UP_STEPS = 3
"""Number of first steps that are not counted."""
TOLD_AFTER = 10
"""Counted steps until the advice is given."""
LEAST_STEPS = 3
"""Smallest number of counted steps for the advice at the end of a run."""


class Layout(NamedTuple):
    """The ranks of a run, and the cores and threads that its roles use."""

    actors: int
    rollouts: int
    tp: int = 1
    cores: int = 0
    """Cores of the one host of the run, if it has no GPUs; 0 with GPUs, of which each rank has one."""
    actor_threads: int = 1
    rollout_threads: int = 1
    is_small: bool = False
    """Whether no process has work for a second thread."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of settings and the steps' rate after it, as a multiple of the rate now."""

    idle: str
    idle_share: float
    change: str
    gain: float

    def __str__(self) -> str:
        return (
            f"the {self.idle} idles {self.idle_share:.0%} of the time: {self.change} would make a step up to {self.gain:.1f} times"
            " as fast (an estimate from the busy seconds of both roles)"
        )


def advise(layout: Layout, actor_busy: float, rollout_busy: float) -> Advice | None:
    """The best change of a run whose trainer and rollouts are busy for these shares of a step; None if nothing would help."""
    if min(actor_busy, rollout_busy) >= 1 - IDLE or max(actor_busy, rollout_busy) < BUSY:
        return None
    busy = (actor_busy, rollout_busy)
    changes = _of_gpus(layout, *busy) if not layout.cores else _of_cores(layout, *busy)
    step, change = min(changes, key=lambda each: round(each[0], 6), default=(1.0, ""))
    if step * LEAST_GAIN > 1:
        return None
    idle, share = min(("trainer", actor_busy), ("rollout", rollout_busy), key=lambda each: each[1])
    return Advice(idle, 1 - share, change, 1 / step)


def _of_gpus(layout: Layout, actor_busy: float, rollout_busy: float) -> Iterator[tuple[float, str]]:
    """Seconds of a step, as a share of those now, with each other split of the ranks; then with more of the busy role."""
    actors = layout.actors
    rollouts = layout.rollouts
    tp = layout.tp
    toward_actors = actor_busy > rollout_busy
    for moved in range(tp, max(actors, rollouts), tp):
        new_actors, new_rollouts = (
            (actors + moved, rollouts - moved) if toward_actors else (actors - moved, rollouts + moved)
        )
        if new_actors >= 1 and new_rollouts >= tp:
            step = max(actor_busy * actors / new_actors, rollout_busy * rollouts / new_rollouts)
            yield step, f"roles.actor={new_actors} roles.rollout={new_rollouts}"
    if toward_actors and rollouts <= tp:
        yield max(actor_busy * actors / (actors + 1), rollout_busy), f"roles.actor={actors + 1} with one more GPU"
    if not toward_actors and actors == 1:
        more = f"{tp} more GPU{'s' * (tp > 1)}"
        yield max(actor_busy, rollout_busy * rollouts / (rollouts + tp)), f"roles.rollout={rollouts + tp} with {more}"


def _of_cores(layout: Layout, actor_busy: float, rollout_busy: float) -> Iterator[tuple[float, str]]:
    """The same with each other number of threads, or with one more rollout for a small policy, while cores are free."""
    actors = layout.actors
    rollouts = layout.rollouts
    cores = layout.cores
    tp = layout.tp
    now = (layout.actor_threads, layout.rollout_threads)
    work = actor_busy * actors * now[0] + rollout_busy * rollouts * now[1]
    if work >= USED * cores:
        return
    if layout.is_small:
        if rollout_busy > actor_busy and actors + rollouts + tp <= cores:
            yield max(actor_busy, rollout_busy * rollouts / (rollouts + tp)), f"roles.rollout={rollouts + tp}"
        return
    for actor_threads in range(1, cores // actors + 1):
        for rollout_threads in range(1, cores // rollouts + 1):
            is_within = actors * actor_threads + rollouts * rollout_threads <= max(cores, actors + rollouts)
            overlaps = cores <= OVERLAP_CORES and rollout_threads == 1
            if (is_within or overlaps) and (actor_threads, rollout_threads) != now:
                each = (actor_busy * now[0] / actor_threads, rollout_busy * now[1] / rollout_threads, work / cores)
                yield max(each), f"trainer.threads={actor_threads} rollout.threads={rollout_threads}"


def layout_of(recipe: Recipe) -> Layout | None:
    """The layout of the run of this process; None where no advice can be given.

    That is with emulated devices, where roles take turns, and on several hosts without GPUs.
    """
    schedule = schedule_of(recipe.run, recipe.rollout)
    staleness = recipe.queue.max_staleness if schedule.staleness is None else schedule.staleness
    if recipe.is_emulated or staleness == 0:
        return None
    counts = (recipe.roles.actor, recipe.roles.rollout, recipe.rollout.tp)
    if torch.cuda.is_available():
        return Layout(*counts)
    if CORES not in os.environ:
        return None
    cores, actor_threads, rollout_threads, is_small = map(int, os.environ[CORES].split(","))
    return Layout(*counts, cores, actor_threads, rollout_threads, bool(is_small))


class Balance:
    """Adds up the busy seconds of a run's steps, and advises once during the run and once at its end."""

    def __init__(self, layout: Layout | None) -> None:
        self._layout = layout
        self._num_steps = 0
        self._step_s = 0.0
        self._actor_s = 0.0
        self._rollout_s = 0.0

    def step(self, step_s: float, waited_s: float, rollout_idle: float | None) -> str:
        """Record a step, in which the rollouts were idle for this share; returns the advice after the step at which it is due, else ""."""
        if rollout_idle is None:
            return ""
        self._num_steps += 1
        if self._num_steps <= WARM_UP_STEPS:
            return ""
        self._step_s += step_s
        self._actor_s += step_s - waited_s
        self._rollout_s += step_s * (1 - rollout_idle)
        return self.advice() if self._num_steps == WARM_UP_STEPS + TOLD_AFTER else ""

    def advice(self) -> str:
        """The advice by all steps so far; empty after too few of them, or if nothing would help."""
        if self._layout is None or self._num_steps < WARM_UP_STEPS + LEAST_STEPS or not self._step_s:
            return ""
        found = advise(self._layout, self._actor_s / self._step_s, self._rollout_s / self._step_s)
        return "" if found is None else str(found)
