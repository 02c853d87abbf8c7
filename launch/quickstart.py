"""The quickstart: makes a small policy and its task unless the user names them, then runs the recipe.

python -m headrace.launch.quickstart [KEY=VALUE ...]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from . import run
from .config.load import read_recipe
from .processes.child import print_message
from .recipes import sort_digits

RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"
WARM_UP_STEPS = 350
NUM_ROWS = 4096
OPENINGS = (
    "Once upon a time", "One day,", "There was a little girl", "There was a boy named Tim", "Lily and Ben",
    "Tom had a dog", "In a small house", "A big bear", "The sun was", "Mom said", "The old man", "A bird sat",
    "It was a", "Sara wanted", "The cat and the", "At the park",
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Make the missing parts, complete the command line with them, run it; returns the exit code."""
    words = [str(RECIPE), *words]
    if "--help" in words or "-h" in words:
        return run.main(words)
    try:
        arguments = run.Arguments.parse(words)
        recipe = read_recipe(arguments.recipe, arguments.overrides)
        words += missing_parts(recipe, is_dry_run=arguments.is_dry_run)
    except SettingError as error:
        print_message(f"error: {error}")
        return 2
    return run.main(words)


def missing_parts(recipe: Recipe, *, is_dry_run: bool) -> list[str]:
    """Overrides for the parts that the recipe does not name; makes their files unless `is_dry_run`.

    The policy and the task made here belong together: with a policy of the user's the prompts are openings of stories,
    and the reward function must be the user's too.
    """
    home = Path("runs") / "quickstart-policy" / f"seed-{recipe.run.seed}"
    parts: dict[str, Path] = {}
    if not recipe.model.path:
        parts["model.path"] = home / "policy"
    if not recipe.data.path:
        parts["data.path"] = home / "openings.jsonl" if recipe.model.path else home / "prompts.jsonl"
    words = [f"{name}={path}" for name, path in parts.items()]
    if not (recipe.model.path or recipe.data.path or recipe.reward.path):
        words.append(f"reward.path={Path(sort_digits.__file__)}:reward")
    if not is_dry_run and parts:
        home.mkdir(parents=True, exist_ok=True)
        for name, path in parts.items():
            _make(name, path, recipe.run.seed)
    return words


def _make(name: str, path: Path, seed: int) -> None:
    if name == "model.path":
        make_policy(path, seed)
    elif path.name == "openings.jsonl":
        path.write_text("".join(json.dumps({"prompt": opening}) + "\n" for opening in OPENINGS), encoding="utf-8")
    else:
        sort_digits.write_data(path, NUM_ROWS, seed)


def make_policy(folder: Path, seed: int) -> None:
    """Build and warm up the policy of this seed, unless its folder exists."""
    if folder.is_dir():
        return
    print_message("making and warming up a small policy (once; about half a minute)")
    from .recipes.tiny_policy import build_policy

    def example(random: Random) -> tuple[str, str]:
        prompt = sort_digits.draw_prompt(random)
        return prompt, sort_digits.demonstrate(prompt, random)

    build_policy(folder, sort_digits.CHARACTERS, example, seed=seed, num_steps=WARM_UP_STEPS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
