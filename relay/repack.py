"""The repack planner: load reports in, moves out. Laminar (arXiv 2510.12633), Section 5 and Algorithm 1.

Towards the end of a version's work each rollout decodes few, long trajectories, and a decode step of few costs nearly as much
as a step of many. So they are packed onto few rollouts; the others are free to take new weights and new prompts.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Report(NamedTuple):
    """A rollout's load at one moment; the `kv_*` are tokens."""

    rollout: str
    version: int
    kv_used: int
    """C_used: the tokens of its unfinished trajectories."""
    kv_before: int
    """C_prev: the same at the previous observation; 0 at the first of a version, which makes no candidate."""
    kv_max: int
    """C_max: the tokens that its cache holds."""
    num_requests: int
    """N_reqs: its unfinished trajectories, queued ones included."""
    num_waiting: int
    """Its queued trajectories."""
    batch_bound: int
    """B: the number of requests beyond which a decode step takes notably longer."""

    @property
    def is_candidate(self) -> bool:
        """It winds down: it runs requests, none waits, the cache is neither full nor filling, the batch is below its bound."""
        is_winding_down = self.kv_used < min(self.kv_max, self.kv_before) and not self.num_waiting
        return is_winding_down and 0 < self.num_requests < self.batch_bound


class Move(NamedTuple):
    """All trajectories of `source` on `version` move to `destination`, which frees the source."""

    source: str
    destination: str
    version: int


def plan_moves(reports: Iterable[Report]) -> list[Move]:
    """Moves that free as many rollouts as best fit finds: within one version, the least loaded rollout first.

    A rollout gives all its trajectories or receives, never both; an empty one never receives. O(n^2) in rollouts of one version.
    """
    candidates: dict[int, list[Report]] = defaultdict(list)
    for report in reports:
        if report.is_candidate:
            candidates[report.version].append(report)
    return [move for version in sorted(candidates) for move in _pack(candidates[version])]


def _pack(candidates: list[Report]) -> list[Move]:
    """Best fit within one version: each source moves to the rollout whose cache will then be fullest."""
    loads = {report.rollout: report for report in sorted(candidates, key=lambda r: (r.kv_used, r.rollout))}
    receivers: set[str] = set()
    moves: list[Move] = []
    for name in list(loads):
        if name in receivers:
            continue
        source = loads.pop(name)
        fitting = [load for load in loads.values() if can_fit(load, source.kv_used, source.num_requests)]
        if not fitting:
            loads[name] = source  # it is not moved, and may still receive
            continue
        best = max(fitting, key=lambda load: (load.kv_used, load.rollout))
        loads[best.rollout] = best._replace(
            kv_used=best.kv_used + source.kv_used, num_requests=best.num_requests + source.num_requests
        )
        receivers.add(best.rollout)
        moves.append(Move(name, best.rollout, source.version))
    return moves


def can_fit(load: Report, kv_tokens: int, num_requests: int) -> bool:
    """Whether a rollout can take this in addition to its load, within its cache and its batch bound."""
    return load.kv_used + kv_tokens <= load.kv_max and load.num_requests + num_requests <= load.batch_bound
