"""The figures of a finished run between its warm-up and its last steps, from the files of the run folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...relay.journal.events import Leased, RowReady
from ...relay.journal.journal import read_events
from ..report.timeline import CounterSample, Span, Timeline

WARM_UP_STEPS = 3
"""First steps, which do not count: the rollouts still generate in step with each other."""
LAST_STEPS = 2
"""Last steps, which do not count: the rollouts begin nothing new."""
WARM_UP_SHARE = 5 / 12
"""`WARM_UP_STEPS` as a share of a longer run: on many devices a trajectory lasts many steps."""
LAST_SHARE = 1 / 6
"""`LAST_STEPS` as a share of a longer run."""


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


class Latency(msgspec.Struct, frozen=True):
    """Seconds from a trajectory's lease to its end."""

    mean: float
    max: float


class Figures(msgspec.Struct, frozen=True):
    """The figures of one run; times in its own seconds, shares from 0 to 1."""

    tokens_per_s: float
    step_s: float
    idle_actor: float
    idle_rollout: float
    kv_util: float
    recompute_share: float
    """Share of a rollout's time spent computing keys and values again."""
    weight_wait_s: float
    """Seconds per rollout and step between two versions: from the end of generation on one until it starts on the next."""
    latency: Latency
    staleness: dict[str, float]
    """Share of the trajectories by staleness: the version that was trained minus the version that began the trajectory."""
    micro_batches: float = 0.0
    """Micro-batches of a step on each rank of the trainer."""
    is_settled: bool = True
    """As much work is under way as in a longer run: trajectories that last for s steps fill the queue in about 2 s, and in the
    last s steps no new work starts. These steps have to be outside of the window."""

    @property
    def mean_staleness(self) -> float:
        return sum(int(lag) * share for lag, share in self.staleness.items())


def figures_of(run_dir: Path, timeline: Timeline, window: Window, prefill_s: float) -> Figures:
    """The figures of the window; `prefill_s` is the time that a token's prefill takes."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    inside = [json.loads(line) for line in lines[window.first : window.last]]
    rollouts = [name for name in timeline.spans if name.startswith("rollout")]
    trained: Counter[str] = Counter()
    for row in inside:
        trained.update(row["staleness/hist"])
    waits = [weight_wait_s(timeline.spans[name], window) for name in rollouts]
    kv_utils = [util for name in rollouts for util in _inside(timeline.samples[name], "kv_util", window)]
    figures = Figures(
        tokens_per_s=sum(row["perf/throughput"] * row["timing_s/step"] for row in inside) / window.seconds,
        step_s=window.seconds / len(inside),
        idle_actor=1 - _share(timeline.spans["actor-0"], "train", window),
        idle_rollout=1 - sum(_share(timeline.spans[name], "generate", window) for name in rollouts) / len(rollouts),
        kv_util=sum(kv_utils) / max(len(kv_utils), 1),
        recompute_share=_growth([timeline.samples[name] for name in rollouts], "recomputed", window) * prefill_s,
        weight_wait_s=sum(waits) / len(waits) / len(inside),
        latency=_latency(run_dir, window),
        staleness={lag: trained[lag] / trained.total() for lag in sorted(trained, key=int)},
        micro_batches=sum(row.get("perf/micro_batches", 0.0) for row in inside) / len(inside),
    )
    before = window.first
    after = len(lines) - window.last
    return replace(figures, is_settled=2 * figures.mean_staleness <= before and figures.mean_staleness <= after)


def window_of(timeline: Timeline, num_steps: int, begun: int = 0) -> Window:
    """The measured part of a run of `num_steps` steps from step `begun` on; a step starts when the trainer begins to wait for its rows."""
    starts: dict[int, float] = {}
    for span in timeline.spans["actor-0"]:
        if "step" in span.facts:
            starts.setdefault(span.facts["step"], span.start)
    num = num_steps - begun
    first = begun + max(WARM_UP_STEPS, int(num * WARM_UP_SHARE))
    last = num_steps - max(LAST_STEPS, int(num * LAST_SHARE))
    assert first < last, f"{num} steps are too few to measure"
    return Window(first, last, starts[first], starts[last])


def weight_wait_s(spans: Sequence[Span], window: Window) -> float:
    """Seconds of the window between generating on one version and generating on the next."""
    total = 0.0
    last = None
    for span in spans:
        if span.state != "generate":
            continue
        if last is not None and span.facts["version"] != last.facts["version"]:
            total += window.share(Span("wait", last.end, span.start, {}))
        last = span
    return total


def _share(spans: Sequence[Span], state: str, window: Window) -> float:
    return sum(window.share(span) for span in spans if span.state == state) / window.seconds


def _inside(samples: Sequence[CounterSample], name: str, window: Window) -> list[float]:
    return [sample.values[name] for sample in samples if window.start <= sample.at < window.end]


def _growth(samples: Sequence[Sequence[CounterSample]], name: str, window: Window) -> float:
    """Growth per second of a number that only grows, averaged over the processes."""
    grown = 0.0
    for each in samples:
        values = _inside(each, name, window)
        grown += values[-1] - values[0] if values else 0.0
    return grown / len(samples) / window.seconds


def latencies(run_dir: Path, window: Window) -> dict[tuple[int, int, int], float]:
    """Seconds from lease to end of the trajectories that ended in the window, by (epoch, prompt, sample), from the journal."""
    begun: dict[tuple[int, int, int], float] = {}
    seconds: dict[tuple[int, int, int], float] = {}
    for _, event in read_events(run_dir / "journal.jsonl"):
        match event:
            case Leased(group=group, samples=samples):
                for sample in samples:
                    begun.setdefault((group.epoch, group.prompt, sample), event.t)
            case RowReady(row=row) if window.start <= event.t < window.end:
                key = (row.epoch, row.prompt, row.sample)
                seconds[key] = event.t - begun[key]
            case _:
                pass
    return seconds


def _latency(run_dir: Path, window: Window) -> Latency:
    seconds = latencies(run_dir, window).values()
    return Latency(sum(seconds) / max(len(seconds), 1), max(seconds, default=0.0))
