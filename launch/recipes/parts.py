"""The parts that the recipes of this folder leave to their start: a small policy and its task, unless the user names them.

`smollm2` fetches a model of 135M parameters instead of making one.
"""

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from random import Random
from typing import NamedTuple

from ...comm.environment import sleeping_threads
from ...comm.recipe import Recipe
from ..config.device_defaults import with_device_defaults
from ..config.gpus import Gpus
from ..processes.child import print_message
from . import addition, calculator, smollm2, smollm2_task, sort_digits
from .names import FOLDER

RECIPE = FOLDER / "quickstart.yaml"
CALCULATOR = FOLDER / "calculator.yaml"
SMOLLM2 = FOLDER / "smollm2.yaml"
MADE = ("model.path", "data.path")
"""The settings whose files a start makes."""
NUM_ROWS = 4096
OPENINGS = (
    "Once upon a time", "One day,", "There was a little girl", "There was a boy named Tim", "Lily and Ben",
    "Tom had a dog", "In a small house", "A big bear", "The sun was", "Mom said", "The old man", "A bird sat",
    "It was a", "Sara wanted", "The cat and the", "At the park",
)  # fmt: skip


class Task(NamedTuple):
    """The task of a small policy: its alphabet, its demonstrations and their number, its prompts, its functions."""

    home: str
    characters: str
    example: Callable[[Random], tuple[str, ...]]
    warm_up_steps: int
    write_data: Callable[[Path, int, int], None]
    functions: dict[str, str]


def _sorting(random: Random) -> tuple[str, ...]:
    prompt = sort_digits.draw_prompt(random)
    return prompt, sort_digits.demonstrate(prompt, random)


def _calculating(random: Random) -> tuple[str, ...]:
    prompt = calculator.draw_prompt(random)
    return prompt, *calculator.demonstrate(prompt, random)


TASKS = {
    RECIPE: Task(
        "quickstart-policy", sort_digits.CHARACTERS, _sorting, 350, sort_digits.write_data,
        {"reward.path": f"{Path(sort_digits.__file__)}:reward"},
    ),
    CALCULATOR: Task(
        "calculator-policy", calculator.CHARACTERS, _calculating, 500, calculator.write_data,
        {
            "reward.path": f"{Path(calculator.__file__)}:reward",
            "environment.tools": f"[{Path(calculator.__file__)}:calc]",
        },
    ),
}  # fmt: skip
"""The task of each recipe."""


class Parts(NamedTuple):
    """The settings that a start adds to a recipe."""

    settings: tuple[str, ...] = ()
    """`NAME=VALUE` of each part, to follow the user's words."""
    unmade: tuple[str, ...] = ()
    """The settings whose files a dry run has not made."""


def add(file: str | None, recipe: Recipe, makes: Collection[str] = MADE) -> Parts:
    """The parts that a recipe of this folder lacks; the files of the settings `makes` are made. Other recipes get none."""
    path = Path(file or "").resolve()
    if path not in (*TASKS, SMOLLM2):
        return Parts()
    settings = _parts_of_smollm2(recipe, makes) if path == SMOLLM2 else missing_parts(recipe, TASKS[path], makes)
    made = (part.partition("=") for part in settings)
    return Parts(tuple(settings), tuple(name for name, _, file in made if not Path(file.partition(":")[0]).exists()))


def show_result(file: str | None, recipe: Recipe) -> None:
    """Print what the model has learnt in a finished run of `smollm2.yaml`."""
    if Path(file or "").resolve() == SMOLLM2:
        smollm2_task.show_progress(Path(recipe.run.dir), recipe.eval)


def _parts_of_smollm2(recipe: Recipe, makes: Collection[str]) -> list[str]:
    """Print how long the run will take, fetch the model, and make the prompts."""
    parts = smollm2_task.missing_parts(recipe)
    to_make = parts.keys() & makes
    if "model.path" in to_make:
        is_evaluated = recipe.eval.every > 0 and bool(recipe.eval.path or "eval.path" in parts)
        smollm2_task.announce(with_device_defaults(recipe, Gpus.of_this_host()), is_evaluated=is_evaluated)
        smollm2.fetch()
    if "data.path" in to_make:
        addition.write_data(smollm2_task.data_folder(recipe.run.seed), recipe.run.seed)
    return [f"{name}={value}" for name, value in parts.items()]


def missing_parts(recipe: Recipe, task: Task = TASKS[RECIPE], makes: Collection[str] = MADE) -> list[str]:
    """Overrides for the parts that the recipe does not name; makes the files of the settings `makes`.

    The policy and the task made here belong together: with a policy of the user's the prompts are openings of stories,
    and the reward function must be the user's too.
    """
    home = Path("runs") / task.home / f"seed-{recipe.run.seed}"
    parts: dict[str, Path] = {}
    if not recipe.model.path:
        parts["model.path"] = home / "policy"
    if not recipe.data.path:
        parts["data.path"] = home / "openings.jsonl" if recipe.model.path else home / "prompts.jsonl"
    words = [f"{name}={path}" for name, path in parts.items()]
    if not (recipe.model.path or recipe.data.path or recipe.reward.path):
        words += [f"{name}={function}" for name, function in task.functions.items() if _lacks(recipe, name)]
    for name, path in parts.items():
        if name in makes:
            home.mkdir(parents=True, exist_ok=True)
            _make(name, path, recipe.run.seed, task)
    return words


def _lacks(recipe: Recipe, name: str) -> bool:
    """Whether the recipe leaves a function to the task. Agents give the reward; tools or an environment of the user's take the place of
    the task's."""
    environment = recipe.environment
    return not (environment.is_served or (environment.is_set and name != "reward.path"))


def _make(name: str, path: Path, seed: int, task: Task) -> None:
    if name == "model.path":
        make_policy(path, seed, task)
        return
    made = path.with_suffix(f".{os.getpid()}")  # a run that reads the file keeps the one before
    if path.name == "openings.jsonl":
        made.write_text("".join(json.dumps({"prompt": opening}) + "\n" for opening in OPENINGS), encoding="utf-8")
    else:
        task.write_data(made, NUM_ROWS, seed)
    made.replace(path)


def make_policy(folder: Path, seed: int, task: Task) -> None:
    """Build and warm up the policy of this seed, unless its folder exists."""
    if folder.is_dir():
        return
    print_message("making and warming up a small policy (once; a minute or two)")
    with sleeping_threads():  # beside other work, threads that spin make this ten times as long
        from .tiny_policy import build_policy

        build_policy(folder, task.characters, task.example, seed=seed, num_steps=task.warm_up_steps)
