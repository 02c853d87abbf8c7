"""The prediction of `headrace plan` beside what the run measured: the key `planned` of `summary.json`, and a line of the last table."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from ...comm.recipe import Recipe
from ...relay.checkpoints import write_durably
from ..config.load import parse_recipe, read_recipe, recipe_yaml
from ..config.run_folder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE

PREDICTION_FILE = "prediction.json"
"""File of the folder of a plan, which is `<run.dir>-plan`."""
WARM_UP_STEPS = 3
"""First steps, which do not count: the rollouts still generate in step with each other."""
LAST_STEPS = 2
"""Last steps, which do not count: the rollouts begin nothing new."""
WARM_UP_SHARE = 5 / 12
"""`WARM_UP_STEPS` as a share of a longer run: on many devices a trajectory lasts many steps."""
LAST_SHARE = 1 / 6
"""`LAST_STEPS` as a share of a longer run."""


class Prediction(msgspec.Struct, frozen=True):
    """The prediction of a plan for a run with these settings, without its first and last steps."""

    settings: dict[str, Any]
    tokens_per_s: float
    step_s: float
    staleness: float
    """Mean over the trajectories."""
    steps: tuple[int, int]
    """The steps [first, last) of the simulated run that it is of."""
    job: str = ""
    """`job_digest` of the recipe that was planned."""


def job_digest(recipe: Recipe, without: Iterable[str]) -> str:
    """A digest of the settings of the work and of the devices, but for those named (`section.name`): of two jobs they differ."""
    left_out = {*without, "roles.relay", "lab.train_gpus", "model.dtype"}  # a start of the run chooses these
    # As a run folder has it: a whole number may be a float there.
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(parse_recipe(recipe_yaml(recipe)))
    kept = {
        f"{section}.{name}": value
        for section, settings in sections.items()
        if section not in ("run", "eval", "checkpoint", "comm")
        for name, value in settings.items()
        if f"{section}.{name}" not in left_out
    }
    return f"{zlib.crc32(json.dumps(kept, sort_keys=True).encode()):08x}"


def plan_folder(run_dir: str | Path) -> Path:
    """Where a plan keeps what it found for a run."""
    return Path(f"{run_dir}-plan")


def measured_steps(num_steps: int, begun: int = 0) -> tuple[int, int]:
    """The steps [first, last) that count, of a run of `num_steps` steps from step `begun` on."""
    num = num_steps - begun
    return begun + max(WARM_UP_STEPS, int(num * WARM_UP_SHARE)), num_steps - max(LAST_STEPS, int(num * LAST_SHARE))


def settles(staleness: float, num_steps: int) -> bool:
    """Whether a run is long enough for its mean staleness: as much work is under way as in a longer one.

    Trajectories that last for s steps fill the queue in about 2 s, and in the last s steps no new work starts.
    """
    first, last = measured_steps(num_steps)
    return 2 * staleness <= first and staleness <= num_steps - last


def with_prediction(
    run_dir: Path,
    summary: Mapping[str, Any],
    prediction: Prediction | None = None,
    measured_in: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The summary with the prediction for this run, and what it measured, if a plan for its settings was made.

    It is also in `summary.json`, if that can be written. measured_in: the steps [first, last) that count; None has those of a run
    that began with its first step. Both figures leave out checkpoints: a simulated run makes none.
    """
    prediction = prediction or _prediction_for(run_dir)
    path = run_dir / METRICS_FILE
    if prediction is None or not path.exists():
        return {**summary}
    lines = path.read_text(encoding="utf-8").splitlines()
    first, last = measured_in or measured_steps(len(lines))
    if first >= last:
        return {**summary}
    names = ("tokens_per_s", "step_s", "staleness")
    predicted = {name: getattr(prediction, name) for name in names}
    measured = dict(zip(names, _measured([json.loads(line) for line in lines[first:last]]), strict=True))
    steps = {"steps": [first, last], "predicted_steps": [*prediction.steps]}
    found = {**summary, "planned": {**steps, "predicted": predicted, "measured": measured}}
    with suppress(OSError):  # a folder that is read-only, or on a full disk, can be shown as well
        write_durably(run_dir / SUMMARY_FILE, (json.dumps(found, indent=2) + "\n").encode())
    return found


def planned_text(summary: Mapping[str, Any]) -> str:
    """The line of the table; empty without a plan."""
    if not (planned := summary.get("planned")):
        return ""
    predicted, measured = (planned[key]["tokens_per_s"] for key in ("predicted", "measured"))
    of_plan, of_run = (f"{first + 1} to {last}" for first, last in (planned["predicted_steps"], planned["steps"]))
    return (
        f"{predicted:,.0f} tokens/s predicted from steps {of_plan} of a simulated run, {measured:,.0f} measured in steps {of_run}"
        f" ({predicted / measured:.2f} times)"
    )


def _measured(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Tokens per second, seconds of a step, and mean staleness."""
    seconds = [step["timing_s/step"] for step in steps]
    num_tokens = sum(step["perf/throughput"] * step["timing_s/step"] for step in steps)
    return num_tokens / sum(seconds), fmean(seconds), fmean(step["staleness/mean"] for step in steps)


def _prediction_for(run_dir: Path) -> Prediction | None:
    """The prediction of the last plan of this run; None without one, or if the run has other settings."""
    path = plan_folder(run_dir) / PREDICTION_FILE
    if not path.exists():
        return None
    try:
        prediction = msgspec.json.decode(path.read_bytes(), type=Prediction)
    except msgspec.MsgspecError:
        return None
    recipe = read_recipe(run_dir / CONFIG_FILE)
    is_same = all(_value(recipe, key) == value for key, value in prediction.settings.items())
    is_same = is_same and job_digest(recipe, prediction.settings) == prediction.job
    return prediction if is_same else None


def _value(recipe: object, key: str) -> object:
    """The value of a setting with its section."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)
