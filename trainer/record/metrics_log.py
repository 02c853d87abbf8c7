"""Metrics of the run: `metrics.jsonl`, and trackers such as TensorBoard."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...comm.clock import Clock
from ...comm.disk import AppendFile
from .trackers.opened import Trackers
from .trackers.tracker import Histogram

Value = float | int | Mapping[str, int]


class MetricsLog:
    """Writes one object per step; values are numbers, or histograms as {"bin": count}."""

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        clock: Clock,
        deadline_s: float = 60.0,
        open_trackers: Callable[[Path], Trackers] = lambda _: Trackers(),
    ) -> None:
        """`deadline_s` bounds the wait for room on a full disk. open_trackers: those of the run, from the lines so far."""
        self.path = run_dir / "metrics.jsonl"
        self._earlier_s = _cut_off(self.path, first_step)
        self._file = AppendFile(self.path, deadline_s)
        self._trackers = open_trackers(self.path)
        self._clock = clock
        self._start = clock.now()

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines so far, one at a time: all lines of a long run would take much memory."""
        if self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run, with those before it was resumed or its trainer was started again."""
        return self._earlier_s + self._clock.now() - self._start

    def write(self, step: int, metrics: Mapping[str, Value], histograms: Mapping[str, Histogram] | None = None) -> None:
        """Record the metrics of optimizer step `step`, counted from 0. Trackers show them at the number that the console gives the step."""
        row = {"step": step, "time_s": round(self.elapsed_s, 3), **metrics}
        self._file.append(json.dumps(row).encode() + b"\n")
        scalars = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
        self._trackers.step(step + 1, scalars, histograms or {})

    def write_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Show an evaluation at its version: at the step that made it, some steps before the one whose line has it."""
        self._trackers.evaluation(int(metrics["eval/version"]), metrics)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Show a text of a step, counted from 0, in the trackers."""
        self._trackers.text(step + 1, name, text)

    def close(self, results: Mapping[str, float] | None = None) -> None:
        """results: those of the whole run."""
        self._file.close()
        self._trackers.end(results)


def _cut_off(path: Path, step: int) -> float:
    """Remove the lines of steps that a resumed run repeats, and a last line without an end; returns the last time that stays."""
    num_bytes = 0
    time_s = 0.0
    if path.exists():
        with path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n") or (row := json.loads(line))["step"] >= step:
                    break
                num_bytes = num_bytes + len(line)
                time_s = row["time_s"]
            file.truncate(num_bytes)
    return time_s
