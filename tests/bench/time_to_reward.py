"""Time to a reward: the steps that rows of each age need, times the seconds that each schedule needs for a step.

    python tests/bench time-to-reward AGES RUN... [--share P ...] [--window STEPS]

AGES is a folder of `python -m bench.fixed_age`, whose cells are measured on small policies. Each RUN is the folder of a finished
run of `compare`, whose seconds a step and staleness are those of emulated devices. So a time of the table is a product of a
measured number and a simulated one.

The target is the reward at a share of what `sync` (age 0) gains in all its steps. A cell has reached it at the first step after
which the mean reward of a window of steps is as high. Rows of age A are drawn by the policy A steps before, so the policy had this
reward A steps earlier; the cell's count is of that policy. The steps for a schedule lie on the line between the ages beside its
mean staleness. Above the highest age there is no line: the steps of that age are shown as a lower bound, with a `>`.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.comm.errors import SettingError
from headrace.launch.command_line import exit_code
from headrace.launch.lab.experiment import RESULT_FILE
from headrace.launch.lab.figures import Figures

Cell = Mapping[str, Any]
"""A cell of `fixed_age`: task, variant, age, seed, steps, final, curves."""


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 2 for a user's mistake."""
    parser = argparse.ArgumentParser("python tests/bench time-to-reward", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ages", type=Path, metavar="AGES", help="a folder of cells of bench.fixed_age")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a finished run of compare")
    parser.add_argument(
        "--share", type=float, nargs="+", default=[0.5, 0.8, 0.9], metavar="P", help="of what age 0 gains"
    )
    parser.add_argument("--window", type=int, default=10, metavar="STEPS", help="steps of a mean reward; default: 10")
    arguments = parser.parse_intermixed_args(words)
    return exit_code(lambda: print(table(arguments.ages, arguments.runs, arguments.share, arguments.window)))


def table(ages: Path, runs: Sequence[Path], shares: Sequence[float], window: int) -> str:
    """Two tables as Markdown: steps by age, and hours by schedule. Raises `SettingError`."""
    cells = [json.loads(path.read_text()) for path in sorted(ages.glob("*.json"))]
    cells = [cell for cell in cells if cell["variant"] == "default" and cell["age"] != "mixed"]
    if not any(cell["age"] == "0" for cell in cells):
        raise SettingError(
            f"{ages}: no cell of age 0 with the variant `default`; run python -m bench.fixed_age {ages} --ages 0,..."
        )
    figures = {label(run): _figures(run) for run in runs}
    lines = [["task, share of the gain", "reward", *(f"age {age:g}" for age in _ages(cells))]]
    hours = [["task, share of the gain", *(f"{name} ({each.mean_staleness:.1f})" for name, each in figures.items())]]
    for task in dict.fromkeys(cell["task"] for cell in cells):
        of_task = [cell for cell in cells if cell["task"] == task]
        for share in shares:
            target = target_of(of_task, share, window)
            steps = steps_by_age(of_task, target, window)
            shown = [f"{steps[age]:.0f}" if age in steps else f">{_num_steps(of_task)}" for age in _ages(cells)]
            lines.append([f"{task}, {share:.0%}", f"{target:.3f}", *shown])
            times = [_hours(steps, each) for each in figures.values()]
            hours.append([f"{task}, {share:.0%}", *times])
    return "\n\n".join(
        "\n".join(f"| {' | '.join(line)} |" for line in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
        for rows in (lines, hours)
    )


def label(run: Path) -> str:
    """What the table calls a run: its schedule and its number of GPUs, from the name that `compare` gives the folder."""
    found = re.match(r"(.+)-(\d+)gpus", run.name)
    return f"{found[1]}, {found[2]} GPUs" if found else run.name


def smoothed(curve: Sequence[float], window: int) -> list[float]:
    """Means of `window` values each; the first is that of the first `window` values."""
    return [statistics.fmean(curve[at : at + window]) for at in range(len(curve) - window + 1)]


def target_of(cells: Sequence[Cell], share: float, window: int) -> float:
    """The reward at a share of what the cells of age 0 gain from their first window to their last."""
    curves = [smoothed(cell["curves"]["reward/mean"], window) for cell in cells if cell["age"] == "0"]
    start = statistics.fmean(curve[0] for curve in curves)
    end = statistics.fmean(curve[-1] for curve in curves)
    return start + share * (end - start)


def steps_to(cell: Cell, target: float, window: int) -> float | None:
    """Steps after which the policy of a cell has the reward `target`; None if it never has."""
    means = smoothed(cell["curves"]["reward/mean"], window)
    reached = next((at for at, mean in enumerate(means) if mean >= target), None)
    if reached is None:
        return None
    return max(reached + (window - 1) / 2 - float(cell["age"]), 1.0)


def steps_by_age(cells: Sequence[Cell], target: float, window: int) -> dict[float, float]:
    """The median over seeds for each age; an age of which half of the seeds or more never reach the target is left out."""
    found: defaultdict[float, list[float]] = defaultdict(list)
    for cell in cells:
        steps = steps_to(cell, target, window)
        found[float(cell["age"])].append(float("inf") if steps is None else steps)
    medians = {age: statistics.median(steps) for age, steps in found.items()}
    return {age: steps for age, steps in medians.items() if steps < float("inf")}


def steps_at(staleness: float, steps: Mapping[float, float]) -> tuple[float, bool]:
    """Steps for rows of a mean staleness, on the line between the ages beside it, and whether it is a lower bound: above the highest age."""
    below = max(age for age in steps if age <= staleness)
    above = min((age for age in steps if age >= staleness), default=None)
    if above is None:
        return steps[below], True
    if above == below:
        return steps[below], False
    part = (staleness - below) / (above - below)
    return steps[below] + part * (steps[above] - steps[below]), False


def _hours(steps: Mapping[float, float], figures: Figures) -> str:
    number, is_bound = steps_at(figures.mean_staleness, steps)
    return f"{'>' if is_bound else ''}{number * figures.step_s / 3600:.2f} h"


def _figures(run: Path) -> Figures:
    try:
        return msgspec.json.decode((run / RESULT_FILE).read_bytes(), type=Figures)
    except (FileNotFoundError, NotADirectoryError):
        raise SettingError(f"{run} is not the folder of a finished run of compare: it has no {RESULT_FILE}") from None


def _ages(cells: Sequence[Cell]) -> list[float]:
    return sorted({float(cell["age"]) for cell in cells})


def _num_steps(cells: Sequence[Cell]) -> int:
    return max(cell["steps"] for cell in cells)
