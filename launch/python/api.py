"""Headrace from Python: `train` starts a run from a script or a notebook, and `Run` is a run that was started, anyhow.

A run is the same as that of the command line: its recipe is in the run folder, and torchrun runs it in processes of its own.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ...comm.errors import HeadraceError, SettingError
from ...comm.recipe import Recipe, RunSettings
from ..config.load import known_settings, read_recipe, recipe_of, refuse_unknown
from ..config.run_checkpoints import TrainedModel
from ..config.run_folder import CONFIG_FILE, METRICS_FILE, make_run_folder, read_summary, remove_empty
from ..resume import finished_after
from .inputs import PythonInputs
from .keywords import dotted_settings, nested
from .samples import last_evaluations, last_samples
from .watched_run import OnStep, RunEnd, WatchedRun, last_log_lines

RECIPE_FILE = "recipe.yaml"
"""File beside the caller's functions and rows: the settings that the call gave; `headrace run` can run it again."""


class RunFailed(HeadraceError, RuntimeError):
    """A run ended without its result. The message has the reason and the last lines of its logs; `run` is the run, if it began."""

    def __init__(self, message: str, run: "Run | None") -> None:
        super().__init__(message)
        self.run = run


class Run:
    """A run folder: what a run has measured, said and exported. Everything is read when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder of a run, which may have ended or not. Raises `SettingError` if it holds none."""
        self.dir = Path(folder).resolve()
        if not (self.dir / CONFIG_FILE).exists():
            raise SettingError(f"run.dir: {folder} holds no run; it has no {CONFIG_FILE}")

    def __repr__(self) -> str:
        status = self.summary.get("status", "without a summary")
        return f"Run({str(self.dir)!r}): {status}, {len(self.metrics)} steps"

    @property
    def recipe(self) -> Recipe:
        """Every setting of the run, as `run.recipe.optimizer.lr`."""
        return read_recipe(self.dir / CONFIG_FILE)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each trained step (docs/use/metrics.md); the first step is 0."""
        path = self.dir / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of the run's end; empty while it runs."""
        return read_summary(self.dir) or {}

    @property
    def model(self) -> Path:
        """The folder of the newest exported model, in Hugging Face format. Raises `SettingError` before the first one."""
        return Path(TrainedModel.find(str(self.dir), "run.dir: ").path).resolve()

    def export(self, folder: str | Path) -> Path:
        """Copy the newest exported model, with its tokenizer, into a new folder; returns it. Raises `SettingError`."""
        target = Path(folder)
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise SettingError(f"export: {folder} exists; give a new folder")
        return Path(shutil.copytree(self.model, target, dirs_exist_ok=True)).resolve()

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Trained trajectories as text: dicts with `step`, `prompt`, `response`, `reward`, `rewards` (of each function), `metrics` (that
        they have logged) and `truncated`.

        step: counted from 0, as in `metrics`; by default the last one. `run.save_rows` decides which steps are there as a whole; of others
        it gives what `samples.jsonl` has (docs/use/viewer.md). Raises `SettingError` for a step of which there is nothing.
        """
        recipe = self.recipe
        try:
            model = str(self.model)
        except SettingError:  # before the first checkpoint
            model = recipe.model.path
        return last_samples(self.dir, recipe, model, step)

    def evaluations(self) -> list[dict[str, Any]]:
        """The responses of all evaluations: the lines of `evaluations.jsonl` (docs/use/evaluation.md), each sample once."""
        return last_evaluations(self.dir)

    def resume(self, steps: int | None = None, *, on_step: OnStep | None = None, **settings: Any) -> "Run":
        """Continue the run after its last step, to `steps` in all; returns it at its end. Arguments and errors are those of `train`.

        Raises `SettingError` if it has finished and `steps` is not more than it has trained.
        """
        own = {"run.dir": self.dir, "run.resume": "auto"} | ({} if steps is None else {"run.steps": steps})
        saved = self.recipe
        values = _known_settings(own, settings, saved=saved)
        inputs = PythonInputs(self.dir)
        before: dict[str, dict[str, Any]] = _moved(msgspec.to_builtins(saved), saved.run.dir, str(self.dir))
        for section, changed in nested(inputs.settings(values)).items():
            before.setdefault(section, {}).update(changed)
        recipe = recipe_of(before)
        if (trained := finished_after(recipe.run)) is not None:
            raise SettingError(
                f"run.steps={recipe.run.steps}: the run in {self.dir} has finished after step {trained}; resume(steps=N) with"
                f" more than {trained} continues it"
            )
        return _start(before, recipe, inputs, on_step)


def train(
    model: "str | Path | Run",
    reward: Any,
    data: Any,
    *,
    eval: Any = None,
    steps: int | None = None,
    lora_rank: int | None = None,
    tools: Sequence[Any] | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
) -> Run:
    """Train a language model by reinforcement learning; returns the run when it has ended.

    model: folder of a model in Hugging Face format, its name on the Hub, the folder of a run or checkpoint, or a `Run`.
    reward: a function in TRL's or verl's form (docs/use/rewards.md), a name such as "gsm8k", "FILE.py:NAME", or a list of these.
    data, eval: a path or name on the Hub, a list of dicts or of texts, or a `datasets.Dataset`.
    tools: functions that the policy may call, with type hints and a docstring.
    on_step: called with the metrics of each trained step. If it returns True, the run ends in order after the step under way.
    settings: any other setting, as `**{"optimizer.lr": 1e-5}`, `optimizer={"lr": 1e-5}`, or by the names of TRL's GRPOConfig.

    Raises `SettingError` for a mistake in these, and `RunFailed`. Ctrl-C, or an error of `on_step`, ends the run in order with a
    checkpoint, and is raised then.
    """
    own = {
        "model.path": model.model if isinstance(model, Run) else model,
        "reward.path": reward,
        "data.path": data,
        "eval.path": eval,
        "run.steps": steps,
        "lora.rank": lora_rank,
        "environment.tools": tools,
    }
    arguments = dict(_argument(name, value) for name, value in own.items() if value is not None)
    values = _known_settings(arguments, settings)
    given = values.get("run.dir")
    run_dir = Path(given or RunSettings().dir).expanduser().resolve()
    new = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    if not given:
        run_dir = _made_free(run_dir)
        new = [run_dir, *new[1:]]
    try:
        inputs = PythonInputs(run_dir)
        sections = nested(inputs.settings(values | {"run.dir": str(run_dir)}))
        return _start(sections, recipe_of(sections), inputs, on_step)
    except BaseException:
        remove_empty(*new)
        raise


def _known_settings(*given: Mapping[str, Any], saved: Recipe | None = None) -> dict[str, Any]:
    """The settings by dotted name, whose values may be objects. Raises `SettingError` for an unknown one or one given twice."""
    values = dotted_settings(*given, saved=saved)
    refuse_unknown(nested(dict.fromkeys(values)))
    return values


def _moved(value: Any, old: str, new: str) -> Any:
    """Settings with the paths of files in a run folder that was renamed: its old name may be that of another run now."""
    if isinstance(value, dict):
        return {key: _moved(each, old, new) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(each, old, new) for each in value]
    is_inside = isinstance(value, str) and value.startswith(f"{old}/")
    return new + value.removeprefix(old) if is_inside else value


def _argument(name: str, value: Any) -> tuple[str, Any]:
    """An argument of `train` as a setting; a dict of the section's settings stands for the section."""
    section = name.partition(".")[0]
    is_section = isinstance(value, dict) and value and all(f"{section}.{key}" in known_settings() for key in value)
    return (section if is_section else name), value


def _made_free(default: Path) -> Path:
    """Make the default run folder, with a number if it is there already: of several calls at a time each makes its own."""
    numbers = count(2)
    folder = default
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            folder = default.with_name(f"{default.name}-{next(numbers)}")
        except OSError as error:
            raise SettingError(f"run.dir: cannot create {folder}: {error.strerror}") from error


def _start(sections: Mapping[str, Any], recipe: Recipe, inputs: PythonInputs, on_step: OnStep | None) -> Run:
    """Write the recipe and its files, run it, and return the run; a start that is refused leaves none of them."""
    from ..config.checks.recipe import check_run_folder

    if "LOCAL_WORLD_SIZE" in os.environ:
        raise SettingError("headrace.train starts torchrun itself; start the script with python")
    if on_step is not None and not callable(on_step):
        raise SettingError(f"on_step: an object of type {type(on_step).__name__} is not a function")
    check_run_folder(recipe.run)
    run_dir = make_run_folder(recipe.run.dir)
    folder = inputs.write()
    before = _saved(run_dir)
    try:
        path = folder / RECIPE_FILE
        path.write_text(yaml.safe_dump(dict(sections), sort_keys=False, allow_unicode=True), encoding="utf-8")
        summary = read_summary(run_dir)
        end = WatchedRun(run_dir, on_step).run([str(path)])
        after = read_summary(run_dir)
        # A start that is refused leaves the summary of the run before.
        return _ended(run_dir, end, after if after and after != summary else {})
    except BaseException:
        if _saved(run_dir) == before:  # otherwise the run has begun, and continues with these files
            inputs.remove()
        raise


def _saved(run_dir: Path) -> bytes:
    """The recipe that the launcher has saved, as it is; empty before it accepts one."""
    path = run_dir / CONFIG_FILE
    return path.read_bytes() if path.exists() else b""


def _ended(run_dir: Path, end: RunEnd, summary: Mapping[str, Any]) -> Run:
    """The run at its end. Raises `SettingError` for a mistake in its settings or functions, and `RunFailed`."""
    error = summary.get("error") or end.error
    if end.code == 2:
        raise SettingError(error)
    run = Run(run_dir) if (run_dir / CONFIG_FILE).exists() else None
    if run is None or (end.code and summary.get("status") != "interrupted"):
        error = error or f"the run ended with exit code {end.code}"
        raise RunFailed(f"{error}{last_log_lines(run_dir)}", run)
    return run
