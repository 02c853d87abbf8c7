"""Kept runs of `tests/bench/curves.py` as the tables and pictures of docs/use/results.md.

A page has a pair of marks for each task, `<!-- addition -->` and `<!-- /addition -->`; what is between them is replaced. A planned
run without a file has a row that says so, and no figure is made up.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from .schedules.plots import pyplot, save

WINDOW = 3
"""Steps of a mean of rewards."""
TARGET = 0.8
_COLOURS = {"headrace": "#3b6ea5", "sync": "#4c9f70", "trl": "#e07b39", "headrace-lora": "#8e5ea2"}
_DASHES = ("-", "--", ":", "-.")
_HEADINGS = (
    "side", "lr", "seed", "steps", "held-out before", "after", "best", "others, before and after", f"minutes to held-out {TARGET:.2f}",
    f"minutes to reward {TARGET:.2f}", "seconds a step", "staleness", "mismatch", "CPU busy (own)",
    "speed, ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: what it trains, on which side, how, and how long."""

    task: str
    side: str
    lr: float
    seed: int
    steps: int

    @property
    def file_name(self) -> str:
        return f"{self.task}-{self.side}-{self.lr:g}-seed{self.seed}.jsonl"


class Point(NamedTuple):
    """A value after so many seconds of a run."""

    seconds: float
    value: float


class Curve:
    """A kept run: its header, steps, end, and the means of the held-out answers by step."""

    def __init__(self, text: str) -> None:
        header, *rows = map(json.loads, text.splitlines())
        self.header: dict[str, Any] = header
        self.steps: list[dict[str, Any]] = [row for row in rows if "reward" in row]
        self.end: dict[str, Any] = next((row for row in rows if "end" in row), {})
        self.held_out: dict[int, dict[str, float]] = {row["step"]: row["held_out"] for row in rows if "held_out" in row}

    @property
    def name(self) -> str:
        return f"{self.header['side']} {self.header['lr']:g}, seed {self.header['seed']}"

    def rewards(self) -> list[Point]:
        """The mean training reward of each step and the two before it."""
        ends = range(WINDOW, len(self.steps) + 1)
        windows = (self.steps[end - WINDOW : end] for end in ends)
        return [Point(window[-1]["seconds"], fmean(step["reward"] for step in window)) for window in windows]

    def accuracy(self) -> list[Point]:
        """The first reward function's mean over the held-out answers; the weights of a step are there when it ends."""
        times = {0: 0.0} | {step["step"]: step["seconds"] for step in self.steps}
        return [Point(times[step], next(iter(self.held_out[step].values()))) for step in sorted(self.held_out)]

    def seconds_a_step(self) -> float:
        """The median, without the first step, which has the start in it."""
        return median(after["seconds"] - before["seconds"] for before, after in itertools.pairwise(self.steps))


def seconds_to(points: Sequence[Point], target: float) -> float | None:
    """When a curve first reaches a value, on the straight line between two points; None if it does not."""
    for before, after in itertools.pairwise(points):
        if before.value < target <= after.value:
            share = (target - before.value) / (after.value - before.value)
            return before.seconds + share * (after.seconds - before.seconds)
    return points[0].seconds if points and points[0].value >= target else None


def read_curves(plan: Sequence[Cell], folder: Path) -> dict[Cell, Curve | None]:
    """The planned runs and other kept ones, None for those without a step."""
    found: dict[Cell, Curve | None] = dict.fromkeys(plan)
    for path in sorted(folder.glob("*.jsonl")):
        curve = Curve(path.read_text(encoding="utf-8"))
        cell = Cell(*(curve.header[name] for name in Cell.__dataclass_fields__))
        planned = next((each for each in found if each.file_name == path.name), cell)
        found[planned] = curve if curve.steps else None
    return found


def write_report(plan: Sequence[Cell], folder: Path, page: Path) -> None:
    """Fill the tables of `page` and draw a picture for each task that has a run. Raises `SettingError` without matplotlib."""
    curves = read_curves(plan, folder)
    text = page.read_text(encoding="utf-8")
    for task in dict.fromkeys(cell.task for cell in curves):
        of_task = {cell: curve for cell, curve in curves.items() if cell.task == task}
        drawn = [curve for curve in of_task.values() if curve is not None]
        body = table(of_task)
        if drawn:
            draw(drawn, task, folder / f"{task}.svg")
            body = f"![{task}: held-out accuracy and reward over time]({folder.name}/{task}.svg)\n\n{body}"
        marks = re.compile(rf"(<!-- {task} -->\n).*?(<!-- /{task} -->)", re.DOTALL)
        text = marks.sub(lambda found, body=body: f"{found[1]}\n{body}\n\n{found[2]}", text)
    page.write_text(text, encoding="utf-8")


def table(curves: dict[Cell, Curve | None]) -> str:
    """The rows of one task, in Markdown."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    for cell, curve in curves.items():
        figures = ["to be measured", *[""] * (len(_HEADINGS) - 5)] if curve is None else _figures(curve)
        steps = cell.steps if curve is None else len(curve.steps)
        lines.append("| " + " | ".join([cell.side, f"{cell.lr:g}", str(cell.seed), str(steps), *figures]) + " |")
    return "\n".join(lines)


def _figures(curve: Curve) -> list[str]:
    accuracy, rewards = curve.accuracy(), curve.rewards()
    values = [point.value for point in accuracy]
    first, last = (curve.held_out[end(curve.held_out)] for end in (min, max)) if values else ({}, {})
    others = [f"{name} {first[name]:.3f} {last[name]:.3f}" for name in [*first][1:]]
    means = [
        fmean(found) if (found := [step[name] for step in curve.steps if name in step]) else None
        for name in ("staleness", "mismatch")
    ]
    return [
        *(f"{value:.3f}" for value in ((values[0], values[-1], max(values)) if values else ())),
        *([] if values else ["to be measured", "", ""]),
        ", ".join(others),
        *(_minutes(seconds_to(points, TARGET)) for points in (accuracy, rewards)),
        f"{curve.seconds_a_step():.1f}" if len(curve.steps) > 1 else "",
        *("" if mean is None else f"{mean:.2g}" for mean in means),
        f"{curve.end['busy']:.0%} ({curve.end['own']:.0%})" if curve.end else "",
        " to ".join(f"{1000 * row['speed']:.0f}" for row in (curve.header, curve.end) if row.get("speed")),
    ]


def _minutes(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds / 60:.1f}"


def draw(curves: Sequence[Curve], task: str, path: Path) -> None:
    """Plot the held-out accuracy and the training reward over minutes, one line for each run."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    seen: dict[str, int] = {}
    for curve in curves:
        side = curve.header["side"]
        style = {
            "color": _COLOURS.get(side),
            "ls": _DASHES[seen.setdefault(side, 0) % len(_DASHES)],
            "label": curve.name,
        }
        seen[side] += 1
        for axis, points, marker in ((axes[0], curve.accuracy(), "o"), (axes[1], curve.rewards(), "")):
            axis.plot([p.seconds / 60 for p in points], [p.value for p in points], marker=marker, ms=3, **style)
    for axis, title in zip(axes, ("held-out, greedy", f"training reward, mean of {WINDOW} steps"), strict=True):
        axis.set(title=f"{task}: {title}", xlabel="minutes since the command")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize="small")
    save(figure, path)
