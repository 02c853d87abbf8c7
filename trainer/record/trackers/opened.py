"""The trackers of a run, as one."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....comm.disk import say
from ....comm.recipe import Recipe
from .board import FOLDER, Board
from .feed import END_S, TrackerFeed
from .settings import changed_settings, shown_settings
from .tracker import Histogram, Tracker

TENSORBOARD = "tensorboard"
"""Its name in `run.report_to`."""


class Trackers:
    """Passes each call on to all of them. The end waits for those that have a process, for `END_S` at most in all."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.begin(config, changed)

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        for tracker in self._trackers:
            tracker.step(step, scalars, histograms)

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.evaluation(version, scalars)

    def text(self, step: int, name: str, text: str) -> None:
        for tracker in self._trackers:
            tracker.text(step, name, text)

    def end(self, results: Mapping[str, float] | None) -> None:
        for tracker in self._trackers:
            tracker.end(results)
        deadline = time.monotonic() + END_S
        for tracker in self._trackers:
            if isinstance(tracker, TrackerFeed):
                tracker.closed(max(0.0, deadline - time.monotonic()))


def open_trackers(recipe: Recipe, first_step: int, metrics: Path) -> Trackers:
    """Those of `run.report_to`. first_step: the run continues with it; it counts from 0. metrics: `metrics.jsonl` as it is now, whose lines a tracker may lack."""
    run_dir = Path(recipe.run.dir)
    past_bytes = metrics.stat().st_size if metrics.exists() else 0
    opened: list[Tracker] = []
    for name in dict.fromkeys(recipe.run.report_to):
        if name == TENSORBOARD:
            opened.append(Board(run_dir / FOLDER, first_step + 1, recipe.comm.deadline_s))
            continue
        try:
            opened.append(TrackerFeed(name, run_dir, past_bytes))
        except OSError as error:  # the machine has no room for another process
            say(f"warning: run.report_to={name}: the run goes on without it ({error.strerror})")
    trackers = Trackers(opened)
    if opened:
        trackers.begin(shown_settings(recipe), changed_settings(recipe))
    return trackers
