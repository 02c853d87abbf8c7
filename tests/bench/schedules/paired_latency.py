"""Latencies of the same trajectories in two runs: a trajectory's length is a function of its number, so only the runs differ."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.comm.messages import RowId
from headrace.launch.lab.figures import latencies, window_of
from headrace.launch.report.timeline import Timeline

if TYPE_CHECKING:
    from .results import Result


class PairedLatency(NamedTuple):
    """Ratios of a run to its peer, over the `num` trajectories that ended in the measured part of both."""

    num: int
    mean: float
    p50: float
    p99: float
    longest: float

    @staticmethod
    def of(run_dir: Path, peer_dir: Path) -> "PairedLatency":
        ours = _latencies(run_dir)
        peers = _latencies(peer_dir)
        both = sorted(ours.keys() & peers.keys())
        assert both, f"no trajectory ended in the measured part of both {run_dir} and {peer_dir}"
        ratios = _spread([ours[row] for row in both]) / _spread([peers[row] for row in both])
        return PairedLatency(len(both), *map(float, ratios))


def paired_table(peer: "Result", ours: "Result") -> str:
    """The ratios of a run to its peer of the same seed, in Markdown."""
    pairs = PairedLatency.of(ours.folder, peer.folder)
    ratios = {
        "tokens/s": ours.figures.tokens_per_s / peer.figures.tokens_per_s,
        "KV in use": ours.more.kv_util / peer.more.kv_util,
        "latency mean": pairs.mean,
        "median": pairs.p50,
        "p99": pairs.p99,
        "longest": pairs.longest,
    }
    cells = {"same trajectories": "ratio", "rollouts + train GPUs": f"{ours.rollouts} + {ours.train_gpus}"}
    cells |= {name: f"{ratio:.3f}" for name, ratio in ratios.items()} | {"number": f"{pairs.num:,}"}
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in (cells, ["---"] * len(cells), cells.values()))


def _latencies(run_dir: Path) -> dict[RowId, float]:
    timeline = Timeline.read(run_dir)
    num_steps = len((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return latencies(run_dir, window_of(timeline, num_steps))


def _spread(seconds: list[float]) -> np.ndarray:
    """Mean, median, 99th percentile, longest."""
    return np.array([np.mean(seconds), *np.percentile(seconds, [50, 99]), max(seconds)])
