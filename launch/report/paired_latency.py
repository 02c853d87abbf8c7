"""Latencies of the same trajectories in two runs: a trajectory's length is a function of its number, so only the runs differ."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from .figures import latencies, window_of
from .timeline import Timeline


class PairedLatency(NamedTuple):
    """Ratios of a run to its peer, over the `num` trajectories that ended in the measured part of both."""

    num: int
    mean: float
    p50: float
    p99: float
    longest: float

    @staticmethod
    def of(run_dir: Path, peer_dir: Path) -> "PairedLatency":
        ours, peers = _latencies(run_dir), _latencies(peer_dir)
        both = sorted(ours.keys() & peers.keys())
        assert both, f"no trajectory ended in the measured part of both {run_dir} and {peer_dir}"
        ratios = _spread([ours[row] for row in both]) / _spread([peers[row] for row in both])
        return PairedLatency(len(both), *map(float, ratios))


def _latencies(run_dir: Path) -> dict[tuple[int, int, int], float]:
    timeline = Timeline.read(run_dir)
    num_steps = len((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return latencies(run_dir, timeline.speed, window_of(timeline, num_steps))


def _spread(seconds: list[float]) -> np.ndarray:
    """Mean, median, 99th percentile, longest."""
    return np.array([np.mean(seconds), *np.percentile(seconds, [50, 99]), max(seconds)])
