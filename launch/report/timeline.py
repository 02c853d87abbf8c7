"""The timeline of a run: the processes' files under `trace/` on one time axis, and `trace.json` for Perfetto."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TRACES = "trace"
"""The folder of the processes' files; a run that has finished keeps it if it was started with `--trace`."""
TRACE_FILE = "trace.json"
MOST_BYTES = 1 << 18
"""Bytes of a process's file from which on `trace.json` has a part of its samples: those of a day and of 64 rollouts are gigabytes."""


class Span(NamedTuple):
    """A state of a process, from `start` to `end`."""

    state: str
    start: float
    end: float
    facts: dict[str, Any]


class CounterSample(NamedTuple):
    """Numbers of a process at one moment."""

    at: float
    values: dict[str, float]


@dataclass(slots=True)
class Timeline:
    """Spans and samples by process. Times are the wall clock's."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    samples: dict[str, list[CounterSample]] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    """When each process was started last."""

    @staticmethod
    def read(run_dir: Path, most_bytes: int = sys.maxsize) -> "Timeline":
        """The timeline of a run folder, without a last line that a killed process did not finish.

        Of a file of k times `most_bytes` every k-th line of samples is read."""
        timeline = Timeline()
        for path in sorted((run_dir / TRACES).glob("*.jsonl")):
            with path.open(encoding="utf-8") as lines:
                timeline._read(path.stem, lines, every=1 + path.stat().st_size // most_bytes)
        return timeline

    def _read(self, name: str, lines: Iterable[str], every: int) -> None:
        spans = self.spans.setdefault(name, [])
        samples = self.samples.setdefault(name, [])
        shift = 0.0
        for number, text in enumerate(lines):
            if number % every and '"values"' in text:
                continue
            try:
                line: dict[str, Any] = json.loads(text)
            except ValueError:
                continue  # the last line of a process that was killed
            if "process" in line:
                shift = line["wall"] - line["clock"]
                self.started[name] = line["clock"] + shift
            elif "state" in line:
                start = line.pop("t") + shift
                length = line.pop("d")
                spans.append(Span(line.pop("state"), start, start + length, line))
            else:
                samples.append(CounterSample(line["t"] + shift, line["values"]))

    def write(self, path: Path) -> None:
        """The trace in Chrome's JSON form, which https://ui.perfetto.dev opens; times in microseconds from the first."""
        with path.open("w", encoding="utf-8") as stream:
            stream.write('{"traceEvents": [')
            for number, event in enumerate(self._events()):
                stream.write((",\n" if number else "") + json.dumps(event))
            stream.write("]}")

    def _events(self) -> Iterator[dict[str, Any]]:
        zero = min((span.start for spans in self.spans.values() for span in spans), default=0.0)
        for number, name in enumerate(self.spans):
            common = {"pid": number, "tid": 0}
            yield {"ph": "M", "name": "process_name", "args": {"name": name}, **common}
            for span in self.spans[name]:
                times = {"ts": 1e6 * (span.start - zero), "dur": 1e6 * (span.end - span.start)}
                lane = {"tid": span.facts.get("lane", 0)}
                yield {"ph": "X", "name": span.state, "args": span.facts, **times, **common, **lane}
            for sample in self.samples[name]:
                for counter, value in sample.values.items():
                    yield {
                        "ph": "C",
                        "name": counter,
                        "ts": 1e6 * (sample.at - zero),
                        "args": {counter: value},
                        **common,
                    }
