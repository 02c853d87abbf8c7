"""Runs of one recipe in virtual time, one after another: the figures of each are read and kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..config.checks.recipe import check_recipe
from ..config.load import read_recipe, recipe_yaml, save_recipe
from ..config.run_folder import CONFIG_FILE, JOURNAL_FILE
from ..processes.child import print_message
from ..report.timeline import Timeline
from .figures import Figures, figures_of, window_of

RESULT_FILE = "outcome.json"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs of one recipe with different settings, each in a folder under `home`."""

    recipe: str
    overrides: Sequence[str]
    home: Path

    def run(self, folder: str, settings: Mapping[str, object]) -> Figures:
        """Run with these settings, or read the figures of an earlier run of the same recipe; raises `SettingError`."""
        run_dir = self.home / folder
        recipe = self.recipe_with(folder, settings)
        if not recipe.data.path:
            recipe = self.recipe_with(
                folder, {**settings, "data.path": self._prompts(recipe.run.steps * recipe.batch.prompts_per_step)}
            )
        if (figures := _kept(run_dir, recipe)) is not None:
            return figures
        if (run_dir / JOURNAL_FILE).exists():
            raise SettingError(f"run.dir: the run in {run_dir} has not finished; remove that folder")
        check_recipe(recipe)
        print_message(f"{run_dir.name} runs")
        from .virtual.run import VirtualRun  # it loads torch, which a command that is refused does not need

        save_recipe(recipe)
        VirtualRun(recipe).run()
        timeline = Timeline.read(run_dir)
        figures = figures_of(run_dir, timeline, window_of(timeline, recipe.run.steps))
        (run_dir / RESULT_FILE).write_bytes(msgspec.json.encode(figures))
        return figures

    def recipe_with(self, folder: str, settings: Mapping[str, object]) -> Recipe:
        """The recipe of a run with these settings."""
        words = [*(f"{key}={value}" for key, value in settings.items()), f"run.dir={self.home / folder}"]
        return read_recipe(self.recipe, [*self.overrides, *words])

    def _prompts(self, num_rows: int) -> Path:
        """Rows for all groups of the run; an emulated rollout does not read them."""
        path = self.home / "prompts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(num_rows)), encoding="utf-8")
        return path


def _kept(run_dir: Path, recipe: Recipe) -> Figures | None:
    """The figures of a finished run of this recipe, None without one. Raises `SettingError` for a run of another recipe."""
    config = run_dir / CONFIG_FILE
    kept = run_dir / RESULT_FILE
    if not kept.exists():
        return None
    if config.read_text(encoding="utf-8") != recipe_yaml(recipe):
        raise SettingError(f"run.dir: {run_dir} holds a run of another recipe; choose another run.dir or remove it")
    return msgspec.json.decode(kept.read_bytes(), type=Figures)
