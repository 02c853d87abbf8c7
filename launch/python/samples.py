"""The texts of a run: the trajectories that it trained, and its answers in evaluations."""

import json
from pathlib import Path
from typing import Any

import msgspec

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...relay.journal.evaluations import EVALUATIONS_FILE
from ...trainer.record.samples_file import SAMPLES_FILE, step_of, whole_lines
from ..resume import ROWS


def last_samples(run_dir: Path, recipe: Recipe, model: str, step: int | None) -> list[dict[str, Any]]:
    """The trajectories of a step, by default of the last one whose rows are saved. Raises `SettingError` without any.

    Of a step without rows these are the ones in `samples.jsonl`, whose texts have special tokens too.
    model: where the tokenizer is; a relative path in the recipe is that of the folder in which the run was started.
    """
    from ...relay.queue.row_file import RowFile
    from ...trainer.policy.model import load_tokenizer
    from ...trainer.step_log import saved_steps

    files = list(saved_steps(run_dir))
    steps = sorted({number for _, number in files})
    wanted = steps[-1] if steps and step is None else step
    if wanted not in steps:
        if found := _recorded_samples(run_dir, wanted):
            return found
        if not steps:
            raise SettingError(f"run.save_rows={recipe.run.save_rows}: {run_dir}/{ROWS} has no rows of a step")
        raise SettingError(
            f"step {wanted}: {run_dir}/{ROWS} has the rows of steps {steps[0]} to {steps[-1]}, and {SAMPLES_FILE} no samples"
            " of it; run.save_rows=all keeps the rows of all steps"
        )
    functions = recipe.reward.functions
    tokenizer = load_tokenizer(model)
    samples: list[dict[str, Any]] = []
    for path in sorted(path for path, number in files if number == wanted):
        rows = RowFile(path, msgspec.Raw).read()
        for key in sorted(rows):
            columns = rows[key]
            metrics = json.loads(columns["reward_info"].tobytes()).get("metrics", {})
            samples.append(
                {
                    "step": wanted,
                    "prompt": tokenizer.decode(columns["prompt_ids"].tolist()),
                    "response": tokenizer.decode(columns["response_ids"].tolist(), skip_special_tokens=True),
                    "reward": float(columns["reward"][0]),
                    "rewards": {name: value for name, value in metrics.items() if name in functions},
                    "metrics": {name: value for name, value in metrics.items() if name not in functions},
                    "truncated": bool(columns["truncated"][0]),
                }
            )
    return samples


def _recorded_samples(run_dir: Path, step: int | None) -> list[dict[str, Any]]:
    """The samples of a step, by default of the last one, in `samples.jsonl`, which counts steps from 1."""
    path = run_dir / SAMPLES_FILE
    if step is None:
        step = max((step_of(line) for line in whole_lines(path, lambda _: True)), default=0) - 1
    lines = (json.loads(line) for line in whole_lines(path, lambda number: number == step + 1))
    return [{**line, "step": step, "truncated": line["finish"] == "cut"} for line in lines]


def last_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of the evaluations' responses; of a sample that is there twice, after a restart, the last one."""
    path = run_dir / EVALUATIONS_FILE
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for each in (json.loads(line) for line in lines if line.endswith("\n")):
        found[each["version"], each["name"], each["row"], each["sample"]] = each
    return list(found.values())
