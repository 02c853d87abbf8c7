"""What a finished run comes to, between its warm-up and its last steps: all of it read from the run folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...relay.journal.events import Leased, RowReady
from ...relay.journal.journal import read_events
from .timeline import Span, Timeline

WARM_UP_STEPS = 3
"""Steps in which the rollouts, which all begin at once, fall out of step."""
LAST_STEPS = 2
"""Steps in which nothing new is begun any more, since the run ends."""


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts: steps [first, last) and their time [start, end), in the timeline's seconds."""

    first: int
    last: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    def share(self, span: Span) -> float:
        """Seconds of a span that lie in it."""
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
    """Share of a rollout's time that goes into computing keys and values again."""
    weight_wait_s: float
    """Seconds per rollout and step in which it had nothing to generate between two versions: from when it ran dry (or was
    stopped) on one until it generates on the next."""
    latency: Latency
    staleness: dict[str, float]
    """Share of the trajectories by (version in training when trained) - (version that began it)."""


def figures_of(run_dir: Path, prefill_s: float) -> Figures:
    """Read a run folder; `prefill_s` is the time that a token's prefill takes.

    A run needs more than `WARM_UP_STEPS + LAST_STEPS` steps.
    """
    timeline = Timeline.read(run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    window = window_of(timeline, len(rows))
    inside = rows[window.first : window.last]
    rollouts = [name for name in timeline.spans if name.startswith("rollout")]
    trained: Counter[str] = Counter()
    for row in inside:
        trained.update(row["staleness/hist"])
    waits = [weight_wait_s(timeline.spans[name], window) for name in rollouts]
    return Figures(
        tokens_per_s=sum(row["perf/throughput"] * row["timing_s/step"] for row in inside) / window.seconds,
        step_s=window.seconds / len(inside),
        idle_actor=1 - _share(timeline.spans["actor-0"], "train", window),
        idle_rollout=1 - sum(_share(timeline.spans[name], "generate", window) for name in rollouts) / len(rollouts),
        kv_util=_mean_sample([timeline.samples[name] for name in rollouts], "kv_util", window),
        recompute_share=_growth([timeline.samples[name] for name in rollouts], "recomputed", window) * prefill_s,
        weight_wait_s=sum(waits) / len(waits) / len(inside),
        latency=_latency(run_dir, timeline.speed, window),
        staleness=_shares(trained),
    )


def window_of(timeline: Timeline, num_steps: int) -> Window:
    """The part of a run of `num_steps` steps that counts, by when its trainer began to wait for each step."""
    starts: dict[int, float] = {}
    for span in timeline.spans["actor-0"]:
        if "step" in span.facts:
            starts.setdefault(span.facts["step"], span.start)
    first, last = WARM_UP_STEPS, num_steps - LAST_STEPS
    assert first < last, f"{num_steps} steps are too few to measure"
    return Window(first, last, starts[first], starts[last])


def weight_wait_s(spans: Sequence[Span], window: Window) -> float:
    """Seconds of the window between generating on one version and generating on the next."""
    total, dry = 0.0, None
    for span in spans:
        if span.state != "generate":
            continue
        if dry is not None and span.facts["version"] != dry.facts["version"]:
            total += window.share(Span("wait", dry.end, span.start, {}))
        dry = span
    return total


def _share(spans: Sequence[Span], state: str, window: Window) -> float:
    return sum(window.share(span) for span in spans if span.state == state) / window.seconds


def _mean_sample(samples: Sequence[Sequence[Any]], name: str, window: Window) -> float:
    values = [value for each in samples for value in _inside(each, name, window)]
    return sum(values) / max(len(values), 1)


def _inside(samples: Sequence[Any], name: str, window: Window) -> list[float]:
    return [sample.values[name] for sample in samples if window.start <= sample.at < window.end]


def _growth(samples: Sequence[Sequence[Any]], name: str, window: Window) -> float:
    """By how much a number that only grows does so per second, on average."""
    grown = 0.0
    for each in samples:
        values = _inside(each, name, window)
        grown += values[-1] - values[0] if values else 0.0
    return grown / len(samples) / window.seconds


def _latency(run_dir: Path, speed: float, window: Window) -> Latency:
    """Latency of the trajectories that ended in the window, from the journal's times."""
    begun: dict[tuple[int, int, int], float] = {}
    seconds: list[float] = []
    for _, event in read_events(run_dir / "journal.jsonl"):
        match event:
            case Leased(group=group, samples=samples):
                for sample in samples:
                    begun.setdefault((group.epoch, group.prompt, sample), event.t * speed)
            case RowReady(row=row) if window.start <= event.t * speed < window.end:
                seconds.append(event.t * speed - begun[row.epoch, row.prompt, row.sample])
            case _:
                pass
    return Latency(sum(seconds) / max(len(seconds), 1), max(seconds, default=0.0))


def _shares(counts: Counter[str]) -> dict[str, float]:
    total = sum(counts.values())
    return {key: counts[key] / total for key in sorted(counts, key=int)}
