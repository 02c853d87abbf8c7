"""Trackers of other packages, each imported when its run begins. Accounts, servers and offline modes are set by their own variables."""

import html
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from .tracker import Histogram, Tracker

PROJECT = "headrace"
"""The project of runs for which the tracker's own variable names none."""


class RunFacts:
    """What a tracker has to know of a run. `id` is that of the tracker's own run: empty at first, then set by the tracker."""

    def __init__(self, name: str, run_id: str, folder: Path) -> None:
        """name: of the run folder. folder: where the package may keep files."""
        self.name = name
        self.id = run_id
        self.folder = folder


class WandbTracker:
    """Weights & Biases. Its steps are those of the run, so a step that comes again is no second point."""

    def __init__(self, facts: RunFacts) -> None:
        self._wandb: Any = import_module("wandb")
        self._facts = facts
        self._run: Any = None

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        facts = self._facts
        facts.id = facts.id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or facts.name,
            id=facts.id,
            dir=os.environ.get("WANDB_DIR") or str(facts.folder),
            resume="allow",
            config=dict(config),
            allow_val_change=True,
            settings=self._wandb.Settings(console=os.environ.get("WANDB_CONSOLE") or "off"),
        )
        self._run.define_metric("eval/*", step_metric="eval/version")

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        shown = {
            name: self._wandb.Histogram(np_histogram=(list(found.counts), list(found.edges)))
            for name, found in histograms.items()
        }
        self._run.log({**scalars, **shown}, step=step)

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        """Its version is an earlier step, which cannot get more points: they come with the line of the present step."""

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def end(self, results: Mapping[str, float] | None) -> None:
        for name, value in (results or {}).items():
            self._run.summary[name] = value
        self._run.finish(exit_code=1 if results is None else 0)
        self._wandb.teardown()


class TrackioTracker:
    """Trackio. It continues a run by its name, so the name has a part that no other run has."""

    def __init__(self, facts: RunFacts) -> None:
        self._trackio: Any = import_module("trackio")
        self._facts = facts
        self._run: Any = None
        self._last = 0

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        facts = self._facts
        is_new = not facts.id
        facts.id = facts.id or f"{facts.name}-{secrets.token_hex(2)}"
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=facts.id,
            resume="never" if is_new else "allow",
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        shown = {
            name: self._trackio.Histogram(np_histogram=(list(found.counts), list(found.edges)))
            for name, found in histograms.items()
        }
        self._run.log({**scalars, **shown}, step=step)
        self._last = step

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        """The line of the present step has it."""

    def text(self, step: int, name: str, text: str) -> None:
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._run.log({name: self._trackio.Markdown(block)}, step=step)

    def end(self, results: Mapping[str, float] | None) -> None:
        if results:
            self._run.log(dict(results), step=self._last)
        self._run.finish()


class MlflowTracker:
    """MLflow, whose client of `mlflow-skinny` logs to a server; the whole package also to a local data base."""

    _MOST_PARAMS = 100
    """Of one call."""
    _MOST_CHARACTERS = 6000
    """Of the value of a parameter."""

    def __init__(self, facts: RunFacts) -> None:
        entities = import_module("mlflow.entities")
        self._client: Any = import_module("mlflow").MlflowClient()
        self._metric: Callable[..., Any] = entities.Metric
        self._param: Callable[..., Any] = entities.Param
        self._facts = facts
        self._last = 0

    def begin(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        client, facts = self._client, self._facts
        if facts.id:
            client.update_run(facts.id, status="RUNNING")
        else:
            tags = {"mlflow.runName": os.environ.get("MLFLOW_RUN_NAME") or facts.name}
            facts.id = client.create_run(self._experiment(), tags=tags).info.run_id
        known = client.get_run(facts.id).data.params  # MLflow refuses another value of a parameter
        params = [self._param(name, str(value)[: self._MOST_CHARACTERS]) for name, value in config.items()]
        params = [param for param in params if param.key not in known]
        for first in range(0, len(params), self._MOST_PARAMS):
            client.log_batch(facts.id, params=params[first : first + self._MOST_PARAMS])
        client.log_dict(facts.id, dict(config), "config.json")

    def _experiment(self) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def step(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """MLflow has no histograms."""
        now = int(1000 * time.time())
        metrics = [self._metric(mlflow_name(name), float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._facts.id, metrics=metrics)
        self._last = step

    def evaluation(self, version: int, scalars: Mapping[str, float]) -> None:
        """The line of the present step has it."""

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._facts.id, text, f"{name}/step_{step}.txt")

    def end(self, results: Mapping[str, float] | None) -> None:
        finite = {name: value for name, value in (results or {}).items() if math.isfinite(value)}
        self.step(self._last, finite, {})
        self._client.set_terminated(self._facts.id, status="FAILED" if results is None else "FINISHED")


def mlflow_name(name: str) -> str:
    """The name of a metric in MLflow, which takes no `@` and no `+`."""
    return re.sub(r"[^\w\-. :/]", "_", name)


PACKAGES: Mapping[str, Callable[[RunFacts], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
"""The trackers of `run.report_to` that have a process of their own, by the names of their packages."""
