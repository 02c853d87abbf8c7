"""The repack planner: load reports in, moves out. Laminar (arXiv 2510.12633), Section 5 and Algorithm 1.

Towards the end of a version's work each rollout decodes few, long trajectories, and a decode step of few costs nearly as much
as a step of many. So they are packed onto few rollouts; the others are free to take new weights and new prompts.

A packed rollout's steps are slower than those of one that empties, and the longest trajectories pay for that until they end. So
the slow-down of a destination is bounded (not in the paper): by its cached tokens its steps take at most 1 + `slowdown` times
those of an empty cache, to which the steps of a rollout that is left alone fall. A step of k cached tokens takes c (K + k), where
K tokens cost as much as the rest of a step of a batch within its bound, to which a destination keeps.
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
    """C_prev: the same at the last plan; 0 before the first plan of a version, where none is a candidate."""
    kv_max: int
    """C_max: the tokens that its cache holds."""
    kv_fixed: float | None
    """K: cached tokens that cost as much time as the rest of a decode step; None bounds nothing."""
    num_requests: int
    """N_reqs: its unfinished trajectories, queued ones included."""
    num_waiting: int
    """Its queued trajectories."""
    batch_bound: int
    """B: the number of requests beyond which a decode step takes notably longer."""

    @property
    def is_candidate(self) -> bool:
        """Whether it may give its requests away: it runs some, none waits, its cache is neither full nor filling, and its batch is below the bound."""
        is_winding_down = self.kv_used < min(self.kv_max, self.kv_before) and not self.num_waiting
        return is_winding_down and 0 < self.num_requests < self.batch_bound

    def with_load_of(self, source: "Report") -> "Report":
        """The load after all trajectories of `source` have moved here."""
        return self._replace(
            kv_used=self.kv_used + source.kv_used, num_requests=self.num_requests + source.num_requests
        )

    def is_within_bounds(self, slowdown: float) -> bool:
        """Whether its cache has room, its batch is within its bound, and the cache slows its steps by this share at most."""
        is_slow = self.kv_fixed is not None and self.kv_used > slowdown * self.kv_fixed
        return self.kv_used <= self.kv_max and self.num_requests <= self.batch_bound and not is_slow


class Move(NamedTuple):
    """All trajectories of `source` on `version` move to `destination`, which frees the source."""

    source: str
    destination: str
    version: int


def plan_moves(reports: Iterable[Report], slowdown: float) -> list[Move]:
    """Moves that free as many rollouts as best fit finds: within one version, the least loaded rollout first.

    `slowdown` is the share by which cached tokens may make a destination's steps slower than those of an empty cache.
    A rollout gives all its trajectories or receives, never both; an empty one never receives. O(n^2) in rollouts of one version.
    """
    candidates: dict[int, list[Report]] = defaultdict(list)
    for report in reports:
        if report.is_candidate:
            candidates[report.version].append(report)
    return [move for version in sorted(candidates) for move in _pack(candidates[version], slowdown)]


def _pack(candidates: list[Report], slowdown: float) -> list[Move]:
    """Best fit within one version: each source moves to the rollout whose cache will then be fullest."""
    loads = {report.rollout: report for report in sorted(candidates, key=lambda r: (r.kv_used, r.rollout))}
    receivers: set[str] = set()
    moves: list[Move] = []
    for name in list(loads):
        if name in receivers:
            continue
        source = loads.pop(name)
        after = (load.with_load_of(source) for load in loads.values())
        best = max(
            (load for load in after if load.is_within_bounds(slowdown)),
            key=lambda r: (r.kv_used, r.rollout),
            default=None,
        )
        if best is None:
            loads[name] = source  # it is not moved, and may still receive
            continue
        loads[best.rollout] = best
        receivers.add(best.rollout)
        moves.append(Move(name, best.rollout, source.version))
    return moves
