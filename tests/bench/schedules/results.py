"""The result of one run of a comparison, and its Gantt chart."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.launch.lab.experiment import Experiment
from headrace.launch.lab.figures import Figures
from headrace.launch.lab.settings import lab_of
from headrace.launch.report.timeline import Timeline

from .figures import MoreFigures, more_figures
from .plots import draw_gantt

MAX_GANTT = 64
"""Rollouts from which on a run gets no Gantt chart."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run, and the devices that it had."""

    folder: Path
    rollouts: int
    train_gpus: int
    figures: Figures
    more: MoreFigures
    knobs: str = ""
    """The knobs that were set beside the split of the devices."""
    speeds: tuple[float, ...] = ()
    """Tokens per second of all seeds, in ascending order, where this is the median of several."""


def run_variant(experiment: Experiment, folder: str, settings: Mapping[str, object]) -> Result:
    """Run a variant, or read the figures of its finished run; one on few rollouts gets a Gantt chart."""
    figures = experiment.run(folder, settings)
    run_dir = experiment.home / folder
    recipe = experiment.recipe_with(folder, settings)
    chart = run_dir / "gantt.png"
    if recipe.roles.rollout < MAX_GANTT and not chart.exists():
        draw_gantt(Timeline.read(run_dir), folder, chart)
    devices = lab_of(recipe.lab)
    more = more_figures(run_dir, figures, devices.prefill_us * 1e-6)
    return Result(run_dir, recipe.roles.rollout, devices.train_gpus, figures, more)
