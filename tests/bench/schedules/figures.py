"""Figures of a run that only a comparison shows: the cache, work done again, waiting for weights, and whether the run was long enough."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.launch.lab.figures import Figures, Window, latencies, window_of
from headrace.launch.report.planned import settles
from headrace.launch.report.timeline import CounterSample, Span, Timeline


class MoreFigures(NamedTuple):
    """Times in the run's own seconds, shares from 0 to 1."""

    kv_util: float
    recompute_share: float
    """Share of a rollout's time spent computing keys and values again."""
    weight_wait_s: float
    """Seconds per rollout and step between two versions: from the end of generation on one until it starts on the next."""
    longest_s: float
    """The longest time from a trajectory's lease to its end."""
    is_settled: bool = True
    """Whether the run was long enough for its staleness."""
    whole_tokens_per_s: float = 0.0
    """Tokens per second of the whole run, with the steps that fill the queue and those in which it drains."""


def more_figures(run_dir: Path, figures: Figures, prefill_s: float) -> MoreFigures:
    """Those of a finished run; `prefill_s` is the time that a token's prefill takes."""
    timeline = Timeline.read(run_dir)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    num_steps = len(steps)
    num_tokens = sum(step["perf/throughput"] * step["timing_s/step"] for step in steps)
    window = window_of(timeline, num_steps)
    rollouts = [name for name in timeline.spans if name.startswith("rollout")]
    waits = [weight_wait_s(timeline.spans[name], window) for name in rollouts]
    kv_utils = [util for name in rollouts for util in _inside(timeline.samples[name], "kv_util", window)]
    return MoreFigures(
        kv_util=sum(kv_utils) / max(len(kv_utils), 1),
        recompute_share=_growth([timeline.samples[name] for name in rollouts], "recomputed", window) * prefill_s,
        weight_wait_s=sum(waits) / len(waits) / (window.last - window.first),
        longest_s=max(latencies(run_dir, window).values(), default=0.0),
        is_settled=settles(figures.mean_staleness, num_steps),
        whole_tokens_per_s=num_tokens / sum(step["timing_s/step"] for step in steps),
    )


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


def _inside(samples: Sequence[CounterSample], name: str, window: Window) -> list[float]:
    return [sample.values[name] for sample in samples if window.start <= sample.at < window.end]


def _growth(samples: Sequence[Sequence[CounterSample]], name: str, window: Window) -> float:
    """Growth per second of a number that only grows, averaged over the processes."""
    grown = 0.0
    for each in samples:
        values = _inside(each, name, window)
        grown += values[-1] - values[0] if values else 0.0
    return grown / len(samples) / window.seconds
