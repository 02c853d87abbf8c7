"""Runs for a comparison in virtual time, one after another: the figures of each are read and kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..config.checks import check_recipe
from ..config.load import CONFIG_FILE, read_recipe, recipe_yaml, save_recipe
from ..processes.child import print_message
from ..report.timeline import Timeline
from .figures import Figures, figures_of, window_of
from .plots import draw_gantt
from .settings import lab_of

RESULT_FILE = "outcome.json"
MAX_GANTT = 64
"""Rollouts from which on a run gets no Gantt chart."""


class Result(msgspec.Struct, frozen=True):
    """The result of one run."""

    folder: str
    rollouts: int
    train_gpus: int
    figures: Figures
    knobs: str = ""
    """The knobs that were set beside the split of the devices."""
    speeds: tuple[float, ...] = ()
    """Tokens per second of all seeds, in ascending order, where this is the median of several."""


def exit_code(command: Callable[[], None]) -> int:
    """Carry out a command of runs: 0, 2 after a user's mistake, which is printed, and 130 after Ctrl-C or SIGTERM."""
    try:
        command()
    except SettingError as error:
        print_message(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs of one recipe with different settings, each in a folder under `home`."""

    recipe: str
    overrides: Sequence[str]
    home: Path
    draws: bool = True
    """Each run gets a Gantt chart."""

    def run(self, folder: str, settings: Mapping[str, object]) -> Result:
        """Run with these settings, or read the result of an earlier run of the same recipe; raises `SettingError`."""
        run_dir = self.home / folder
        words = [*self.overrides, *(f"{key}={value}" for key, value in settings.items()), f"run.dir={run_dir}"]
        recipe = read_recipe(self.recipe, words)
        if not recipe.data.path:
            recipe = read_recipe(self.recipe, [*words, f"data.path={self._prompts(recipe)}"])
        if (result := _kept(run_dir, recipe)) is not None:
            return result
        if (run_dir / "journal.jsonl").exists():
            raise SettingError(f"run.dir: the run in {run_dir} has not finished; remove that folder")
        check_recipe(recipe)
        print_message(f"{run_dir.name} runs")
        from .virtual.run import VirtualRun  # it loads torch, which a command that is refused does not need

        save_recipe(recipe)
        VirtualRun(recipe).run()
        timeline = Timeline.read(run_dir)
        figures = figures_of(run_dir, timeline, window_of(timeline, recipe.run.steps), lab_of(recipe).prefill_us * 1e-6)
        result = Result(str(run_dir), recipe.roles.rollout, lab_of(recipe).train_gpus, figures)
        if self.draws and result.rollouts < MAX_GANTT:
            draw_gantt(timeline, run_dir.name, run_dir / "gantt.png")
        (run_dir / RESULT_FILE).write_bytes(msgspec.json.encode(result))
        return result

    def _prompts(self, recipe: Recipe) -> Path:
        """Rows for all groups of the run; an emulated rollout does not read them."""
        path = self.home / "prompts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        num_rows = recipe.run.steps * recipe.batch.prompts_per_step
        path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(num_rows)), encoding="utf-8")
        return path


def _kept(run_dir: Path, recipe: Recipe) -> Result | None:
    """The result of a finished run of this recipe, None without one. Raises `SettingError` for a run of another recipe."""
    config = run_dir / CONFIG_FILE
    kept = run_dir / RESULT_FILE
    if not kept.exists():
        return None
    if config.read_text(encoding="utf-8") != recipe_yaml(recipe):
        raise SettingError(f"run.dir: {run_dir} holds a run of another recipe; choose another run.dir or remove it")
    return msgspec.json.decode(kept.read_bytes(), type=Result)
