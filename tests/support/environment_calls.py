"""Calls of a pool of environments, and their answers."""

import time
from collections.abc import Sequence

from headrace.rollout.environments.pool import EnvironmentCall, EnvironmentPool

PATIENCE_S = 60.0


def answered(pool: EnvironmentPool, calls: Sequence[EnvironmentCall], num: int | None = None) -> list[EnvironmentCall]:
    """Submit calls, and wait for as many answers, or for `num`: in the order of the trajectories' numbers."""
    for call in calls:
        pool.submit(call)
    found: list[EnvironmentCall] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < (len(calls) if num is None else num):
        assert time.monotonic() < deadline, f"{len(found)} answers"
        found += pool.finished()
        time.sleep(0.002)
    return sorted(found, key=lambda call: call.number)
