"""Metrics of the run: `metrics.jsonl`, trackers such as TensorBoard, and one console line per step."""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...comm.clock import Clock, estimate
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


class TimeLeft:
    """How long the steps that are left will take, from the mean of the last ones. A run's first step is left out: it warms up."""

    STEPS = 8
    LEAST_S = 60.0

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._last: deque[float] | None = None

    def after(self, step: int, seconds: float) -> str:
        """The remaining time for the console's line of step `step` (counted from 0); empty after the first step, and below a minute."""
        if self._last is None:
            self._last = deque(maxlen=self.STEPS)
            return ""
        self._last.append(seconds)
        left = (self._num_steps - 1 - step) * sum(self._last) / len(self._last)
        return f"  {estimate(left)} left" if left >= self.LEAST_S else ""


def console_line(step: int, num_steps: int, metrics: Mapping[str, Value]) -> str:
    """The line of a step on the console.

    It has the mismatch of generator and trainer, or, where no token is of the version in training, the KL divergence of the older ones.
    """
    m = metrics
    distance = ""
    if "mismatch/logprob_abs_diff" in m:
        distance = f"  mismatch {m['mismatch/logprob_abs_diff']:.1e}"
    elif "staleness/kl" in m:
        distance = f"  stale kl {m['staleness/kl']:.1e}"
    return (
        f"step {step + 1:>4}/{num_steps}  reward {m['reward/mean']:.3f}  length {m['response_length/mean']:6.1f}"
        f"  entropy {m['actor/entropy']:.3f}  grad {m['actor/grad_norm']:.2f}  staleness {m['staleness/mean']:.2f}"
        f"{distance}"
        f"  {m['perf/throughput']:6.0f} tok/s  {m['timing_s/step']:.2f} s (waits {m['timing_s/wait_data']:.2f})"
    )


def evaluation_line(metrics: Mapping[str, Value]) -> str:
    """The line of a complete evaluation on the console; `avg@k` and `pass@k` of each file, and its mean length."""
    files = dict.fromkeys(name.split("/")[1] for name in metrics if name.startswith("eval/") and name.count("/") > 1)
    parts = [f"evaluation of version {metrics['eval/version']:.0f}"]
    for file in files:
        found = {
            name.removeprefix(f"eval/{file}/"): value for name, value in metrics.items() if f"eval/{file}/" in name
        }
        shown = [f"{name} {value:.3f}" for name, value in found.items() if "@" in name]
        shown += [f"length {found['response_length/mean']:.1f}"] if "response_length/mean" in found else []
        shown += [f"{found['missing']:.0f} missing"] if found["missing"] else []
        parts.append(f"{file}: {' '.join(shown)}")
    return "  ".join(parts)


def unbeaten_line(metric: str, scores: Mapping[int, float], saved: Collection[int]) -> str:
    """Where no `saved` version has beaten the model before training, which has no checkpoint; "" otherwise. `scores` are by version."""
    later = [score for version, score in scores.items() if version and version in saved]
    if not later or 0 not in scores or max(later) > scores[0]:
        return ""
    return (
        f"no checkpoint beat the model before training: {metric} was {scores[0]:.3f} at step 0, and at most"
        f" {max(later):.3f} in a later checkpoint"
    )


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
