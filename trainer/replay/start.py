"""Where a replay begins: with the initial weights or a checkpoint of the run, from which the rows of all steps up to the last one are there."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...comm.errors import SettingError
from ...relay.checkpoints import CheckpointFolder
from ..step_log import rows_problem

METRICS = "metrics.jsonl"


class Start(msgspec.Struct, frozen=True):
    """The weights that a replay begins with, which have been trained for `version` steps."""

    version: int = 0
    checkpoint: str = ""
    """Folder of a checkpoint; without one they are those of `model.path`."""
    digest: str = ""
    """What `pack.weights_digest` must find; empty if it is not checked."""


def recorded_steps(run_dir: Path) -> Mapping[int, Mapping[str, Any]]:
    """The metrics of the steps of a run, by step. Raises `SettingError` without any."""
    path = run_dir / METRICS
    if not path.exists():
        raise SettingError(f"{run_dir} is not the folder of a run: it has no {METRICS}")
    # Of a run under way the last line may be in the writing.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    found: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found[int(row["step"])] = row
        except (ValueError, TypeError, KeyError) as error:
            raise SettingError(f"line {number} of {path} is not the metrics of a step: {error!r}") from error
    if not found:
        raise SettingError(f"the run in {run_dir} has trained no step yet")
    return found


def wanted_steps(run_dir: Path, recorded: Mapping[int, Any], given: tuple[int, int] | None) -> range | None:
    """The steps that were asked for by the numbers of the first and the last one, which count from 1. Raises `SettingError`."""
    if given is None:
        return None
    first, last = given
    if not 1 <= first <= last <= max(recorded) + 1:
        words = f"{first}" if first == last else f"{first}-{last}"
        raise SettingError(
            f"--steps {words}: the run in {run_dir} has trained steps 1 to {max(recorded) + 1}; write N, or FIRST-LAST"
        )
    return range(first - 1, last)


def choose_start(run_dir: Path, num_ranks: int, end: int, wanted: range | None) -> Start:
    """The latest start from which the `wanted` steps are reached; without them the earliest from which all steps before `end` are.

    Every byte of a checkpoint's state is read before it is chosen. Raises `SettingError`, with the reason, if no start reaches them.
    """
    stop = end if wanted is None else wanted.stop
    problems = {step: why for step in range(stop) if (why := rows_problem(run_dir, step, num_ranks))}
    folder = CheckpointFolder(run_dir)
    latest = stop - 1 if wanted is None else wanted.start
    versions = [version for version in (0, *folder.whole()) if version <= latest]
    usable = [version for version in versions if not any(version <= step for step in problems)]
    for version in usable if wanted is None else reversed(usable):
        if not version:
            return Start()
        if why := folder.problem(version, "dcp/*"):
            print(f"checkpoints/{folder.path(version).name} {why}; it is skipped", flush=True)
        else:
            return Start(version, str(folder.path(version)))
    raise SettingError(f"run.dir: {_reason(run_dir, versions, problems, latest)}")


def _reason(run_dir: Path, versions: Sequence[int], problems: Mapping[int, str], latest: int) -> str:
    later = [step for step in problems if step >= versions[-1]]
    why = f": {problems[later[0] if later else max(problems)]}" if problems else ""
    return (
        f"step {latest + 1} of the run in {run_dir} cannot be trained again{why}. It needs a checkpoint, or the initial weights, and"
        " the rows of every step since; run.save_rows=all keeps the rows of all steps"
    )
