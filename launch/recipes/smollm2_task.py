"""The quickstart of SmolLM2: the settings that it adds to `smollm2.yaml`, the time that it will take, and what the model learnt."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...comm.recipe import EvalSettings, Recipe
from ...relay.journal.evaluations import EVALUATIONS_FILE
from ..processes.child import print_message
from . import addition, smollm2, step_speed

STEP_UNITS = 900.0
"""Core seconds of a step of 16 x 8 short responses, in seconds of `step_speed`: 22.0 s on two cores where that is .050 s."""
EVALUATION_UNITS = 1200.0
"""The same of the two evaluations."""
START_S = 30.0
MOST_CORES = 8
"""More cores than these make a step of this size hardly faster."""
SHOWN = 10
"""Number of prompts that are shown."""
MOST_SHOWN = 32
"""Most characters of an answer that are shown."""


def missing_parts(recipe: Recipe) -> dict[str, str]:
    """The settings that the recipe does not name: the model, and the task with its evaluation unless there is other data.

    A run of a few steps has no warm-up.
    """
    parts: dict[str, str] = {}
    if recipe.optimizer.warmup_steps >= recipe.run.steps:
        print_message(f"optimizer.warmup_steps=0: a run of {recipe.run.steps} steps has no room for a warm-up")
        parts["optimizer.warmup_steps"] = "0"
    if not recipe.model.path:
        parts["model.path"] = str(smollm2.folder())
    if not recipe.data.path:
        home = data_folder(recipe.run.seed)
        parts["data.path"] = str(home / addition.PROMPTS_FILE)
        if recipe.environment.is_served:  # agents give the reward, and are not evaluated
            return parts
        if not recipe.reward.path:
            parts["reward.path"] = f"{Path(addition.__file__)}:score"
        if not recipe.eval.path:
            parts["eval.path"] = str(home / addition.HELD_OUT_FILE)
    return parts


def data_folder(seed: int) -> Path:
    """Where the prompts of a seed are."""
    return Path("runs") / "smollm2-data" / f"seed-{seed}"


def announce(recipe: Recipe, *, is_evaluated: bool) -> None:
    """Measure this machine and print how long the run will take in the type of the recipe."""
    seconds_of = step_speed.measured()
    dtype = recipe.model.compute_type
    if dtype not in seconds_of:
        return
    speed = seconds_of[dtype]
    cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
    share = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt / 128
    step_s = STEP_UNITS * share * speed / cores
    seconds = START_S + is_evaluated * EVALUATION_UNITS * speed / cores + recipe.run.steps * step_s
    evaluations = ", and two evaluations" if is_evaluated else ""
    print_message(
        f"{recipe.run.steps} steps of about {step_s:.0f} s on the {cores} cores of this machine{evaluations}: about"
        f" {max(1, round(seconds / 60))} min. The line of each step says how long the rest will take"
    )


def show_progress(run_dir: Path, settings: EvalSettings) -> None:
    """Print what the model answered before and after training, and how often it was right."""
    for name, answers in _by_file(run_dir / EVALUATIONS_FILE).items():
        first = min(answers)
        last = max(answers)
        before = answers[first]
        after = answers[last]
        rows = [json.loads(line) for line in _lines_of(settings, name)]
        if first == last or not rows:
            continue
        width = max(len(_question(row)) for row in rows[:SHOWN])
        print(f"\n{'held-out prompt':{width}}  {'before':40}  after")
        for number in sorted(before.keys() & after.keys())[:SHOWN]:
            old = _shown(before[number])
            new = _shown(after[number])
            print(f"{_question(rows[number]):{width}}  {old:40}  {new}")
        print(f"right: {_share(before)} before, {_share(after)} after {last} steps", flush=True)


Answers = dict[int, dict[str, Any]]
"""The lines of an evaluation by the number of their prompt."""


def _by_file(path: Path) -> dict[str, dict[int, Answers]]:
    """Answers by file of prompts and version; of a line that is there twice, the last one."""
    found: dict[str, dict[int, Answers]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        each = json.loads(line)
        found.setdefault(each["name"], {}).setdefault(each["version"], {})[each["row"]] = each
    return found


def _lines_of(settings: EvalSettings, name: str) -> Iterator[str]:
    for path in map(Path, settings.paths):
        if path.stem == name and path.suffix == ".jsonl":
            yield from path.read_text(encoding="utf-8").splitlines()


def _question(row: dict[str, Any]) -> str:
    prompt = row["prompt"]
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"]).replace("\n", " ")[:60]


def _shown(answer: dict[str, Any]) -> str:
    text = " ".join(answer["text"].split())
    return f"{text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + '…'} ({'right' if answer['reward'] == 1 else 'wrong'})"


def _share(answers: Answers) -> str:
    num_right = sum(answer["reward"] == 1 for answer in answers.values())
    return f"{num_right} of {len(answers)} ({num_right / len(answers):.3f})"
