"""The figures of a finished run between its warm-up and its last steps, from the files of the run folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...comm.messages import RowId
from ...relay.journal.events import Leased, RowReady
from ...relay.journal.files import read_events
from ..config.run_folder import JOURNAL_FILE, METRICS_FILE
from ..report.planned import measured_steps
from ..report.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a run: steps [first, last) and their time [start, end), in the timeline's seconds."""

    first: int
    last: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def share(self, span: Span) -> float:
        """Seconds of a span that are inside the window."""
        return max(0.0, min(span.end, self.end) - max(span.start, self.start))


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run; times in its own seconds, shares from 0 to 1."""

    tokens_per_s: float
    step_s: float
    idle_actor: float
    idle_rollout: float
    latency_s: float
    """Mean seconds from a trajectory's lease to its end."""
    staleness: dict[str, float]
    """Share of the trajectories by staleness: the version that was trained minus the version that began the trajectory."""
    micro_batches: float = 0.0
    """Micro-batches of a step on each rank of the trainer."""

    @property
    def mean_staleness(self) -> float:
        return sum(int(lag) * share for lag, share in self.staleness.items())


def figures_of(run_dir: Path, timeline: Timeline, window: Window) -> Figures:
    """The figures of the window."""
    lines = (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    inside = [json.loads(line) for line in lines[window.first : window.last]]
    rollouts = [name for name in timeline.spans if name.startswith("rollout")]
    trained: Counter[str] = Counter()
    for row in inside:
        trained.update(row["staleness/hist"])
    seconds = latencies(run_dir, window).values()
    return Figures(
        tokens_per_s=sum(row["perf/throughput"] * row["timing_s/step"] for row in inside) / window.seconds,
        step_s=window.seconds / len(inside),
        idle_actor=1 - _share(timeline.spans["actor-0"], "train", window),
        idle_rollout=1 - sum(_share(timeline.spans[name], "generate", window) for name in rollouts) / len(rollouts),
        latency_s=sum(seconds) / max(len(seconds), 1),
        staleness={lag: trained[lag] / trained.total() for lag in sorted(trained, key=int)},
        micro_batches=sum(row.get("perf/micro_batches", 0.0) for row in inside) / len(inside),
    )


def window_of(timeline: Timeline, num_steps: int, begun: int = 0) -> Window:
    """The measured part of a run of `num_steps` steps from step `begun` on; a step starts when the trainer begins to wait for its rows."""
    starts: dict[int, float] = {}
    for span in timeline.spans["actor-0"]:
        if "step" in span.facts:
            starts.setdefault(span.facts["step"], span.start)
    first, last = measured_steps(num_steps, begun)
    assert first < last, f"{num_steps - begun} steps are too few to measure"
    return Window(first, last, starts[first], starts[last])


def _share(spans: Sequence[Span], state: str, window: Window) -> float:
    return sum(window.share(span) for span in spans if span.state == state) / window.seconds


def latencies(run_dir: Path, window: Window) -> dict[RowId, float]:
    """Seconds from lease to end of the trajectories that ended in the window, from the journal."""
    begun: dict[RowId, float] = {}
    seconds: dict[RowId, float] = {}
    for _, event in read_events(run_dir / JOURNAL_FILE):
        match event:
            case Leased(group=group, samples=samples):
                for sample in samples:
                    begun.setdefault(group.row(sample), event.t)
            case RowReady(row=row) if window.start <= event.t < window.end:
                seconds[row] = event.t - begun[row]
            case _:
                pass
    return seconds
