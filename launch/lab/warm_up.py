"""A short real run of a recipe, whose devices a plan measures."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...comm.errors import SettingError
from ...comm.waits import waiting
from ..config.checks.recipe import check_recipe
from ..config.load import read_recipe, recipe_yaml
from ..config.run_folder import CONFIG_FILE, read_summary
from ..processes.child import Child, print_message

WARM_UP = {"run.steps": 20, "optimizer.lr_schedule": "constant", "optimizer.min_lr_ratio": 0}
"""Settings of a warm-up run: so few steps have no room for the schedule of a long run."""
POLL_S = 0.5
END_S = 120.0
"""Seconds that an interrupted run has to end, more than the launcher takes until it kills the run."""


def warm_up(recipe: str, overrides: Sequence[str], run_dir: Path) -> None:
    """Run the recipe for a few steps, unless a run of it is finished in `run_dir`. Raises `SettingError` if it fails."""
    words = [*overrides, *(f"{key}={value}" for key, value in WARM_UP.items()), f"run.dir={run_dir}"]
    short = read_recipe(recipe, words)
    if (read_summary(run_dir) or {}).get("status") == "finished":
        if (run_dir / CONFIG_FILE).read_text(encoding="utf-8") != recipe_yaml(short):
            raise SettingError(f"run.dir: {run_dir} holds a run of another recipe; choose another run.dir or remove it")
        return
    check_recipe(short)
    print_message(f"{run_dir.name} runs")
    if code := run_to_end([sys.executable, "-m", "headrace.launch.run", recipe, *words, "--trace"]):
        raise SettingError(f"run.dir: the run in {run_dir} ended with {code}; see its logs")


def run_to_end(command: Sequence[str]) -> int:
    """Run a command to its end; returns its exit code. An interrupt here ends the command in order first."""
    run = Child("the run", command, console=False, death_signal=signal.SIGTERM)
    try:
        while (code := run.poll()) is None:
            time.sleep(POLL_S)
        return code
    finally:
        if run.poll() is None:
            run.send(signal.SIGTERM)
            with waiting(run.name, "its end", END_S) as wait:
                wait.until(lambda: run.poll() is not None, POLL_S)
