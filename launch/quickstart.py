"""The quickstart: makes a small policy and its task where none are given, then runs the recipe.

python -m headrace.launch.quickstart [KEY=VALUE ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from ..comm.errors import SettingError
from . import run
from .children import say
from .config import Recipe, read_recipe
from .recipes import sort_digits

RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"
WARM_UP_STEPS = 350
NUM_ROWS = 4096


def main(words: Sequence[str]) -> int:
    """Complete the command line with what is made here, and hand it on; returns the exit code."""
    words = [str(RECIPE), *words]
    if "--help" in words or "-h" in words:
        return run.main(words)
    try:
        arguments = run.Arguments.parse(words)
        recipe = read_recipe(arguments.recipe, arguments.overrides)
        words += missing_parts(recipe, is_dry_run=arguments.is_dry_run)
    except SettingError as error:
        say(f"error: {error}")
        return 2
    return run.main(words)


def missing_parts(recipe: Recipe, *, is_dry_run: bool) -> list[str]:
    """Overrides for the policy, the data and the reward function that the recipe does not name; makes the files."""
    parts: list[str] = []
    home = Path("runs") / "quickstart-policy" / f"seed-{recipe.run.seed}"
    if not recipe.model.path:
        if not is_dry_run:
            make_policy(home / "policy", recipe.run.seed)
        parts.append(f"model.path={home / 'policy'}")
    if not recipe.data.path:
        if not is_dry_run:
            home.mkdir(parents=True, exist_ok=True)
            sort_digits.write_data(home / "prompts.jsonl", NUM_ROWS, recipe.run.seed)
        parts.append(f"data.path={home / 'prompts.jsonl'}")
    if not recipe.reward.path:
        parts.append(f"reward.path={Path(sort_digits.__file__)}:reward")
    return parts


def make_policy(folder: Path, seed: int) -> None:
    """Build and warm up the policy of this seed, unless an earlier quickstart has."""
    if folder.is_dir():
        return
    say("a small policy is made and warmed up (once; about half a minute)")
    from .tiny_policy import build_policy

    def example(random: Random) -> tuple[str, str]:
        prompt = sort_digits.draw_prompt(random)
        return prompt, sort_digits.demonstrate(prompt, random)

    folder.parent.mkdir(parents=True, exist_ok=True)
    build_policy(folder, sort_digits.CHARACTERS, example, seed=seed, num_steps=WARM_UP_STEPS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
