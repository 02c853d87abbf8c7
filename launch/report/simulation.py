"""Devices of a plan, and their simulated runs: each is a run in virtual time with other settings."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...rollout.generators.emulated_device import EmulatedDevice, response_length
from ..config.load import recipe_yaml
from .experiment import Experiment
from .figures import Figures
from .tuning import Knobs, Ladder, climb

SAMPLE = 256
"""Responses whose lengths give the mean ones."""
WORTH = 1.01
"""Gain in tokens/s from which on a larger micro-batch is proposed."""


@dataclass(frozen=True, slots=True)
class Devices:
    """A recipe on emulated devices, and how many of them there are."""

    recipe: Recipe
    num_gpus: int

    @staticmethod
    def of(recipe: Recipe, num_gpus: int | None = None) -> "Devices":
        """The devices of an emulated recipe, or `num_gpus` like them. Raises `SettingError` for too few."""
        e = recipe.emulated
        if e.colocated:
            raise SettingError("emulated.colocated: colocated devices have no split to plan")
        total = e.train_gpus + e.gpus_per_rollout * recipe.roles.rollout if num_gpus is None else num_gpus
        if total <= e.gpus_per_rollout:
            raise SettingError(f"--gpus: {total} are too few; a trainer needs 1 and a rollout {e.gpus_per_rollout}")
        return Devices(recipe, total)

    @property
    def most_rollouts(self) -> int:
        return (self.num_gpus - 1) // self.recipe.emulated.gpus_per_rollout

    def train_gpus(self, knobs: Knobs) -> int:
        return self.num_gpus - self.recipe.emulated.gpus_per_rollout * knobs.rollouts

    @property
    def own(self) -> Knobs:
        """The split of the recipe."""
        return Knobs(self.recipe.roles.rollout, self.recipe.generator.max_running)

    @property
    def balanced(self) -> Knobs:
        """The split at which full rollouts generate as fast as the trainer trains, by means alone: the climb's start."""
        recipe, e = self.recipe, self.recipe.emulated
        longest, most = recipe.sampling.max_new_tokens, recipe.generator.max_running
        lengths = [response_length(recipe.run.seed, number, e, longest) for number in range(SAMPLE)]
        response = fmean(lengths)
        in_cache = e.prompt_tokens + fmean(length**2 for length in lengths) / 2 / response
        running = max(1, min(most, int(e.kv_tokens / in_cache)))
        step_s = EmulatedDevice(e, most).steps_s(running, int(running * in_cache), 1)
        trained_s = (e.prompt_tokens + response) * e.train_us * 1e-6 * running / max(response * step_s, 1e-9)
        rollouts = round(self.num_gpus / (trained_s + e.gpus_per_rollout))
        return Knobs(min(max(rollouts, 1), self.most_rollouts), most)

    def ladders(self, start: Knobs) -> dict[str, Ladder]:
        """All splits, of many devices in steps of a sixteenth; the concurrency up to twice the recipe's."""
        step, running = max(1, start.rollouts // 16), start.max_running or 1
        splits = {start.rollouts, *range(start.rollouts % step or step, self.most_rollouts + 1, step)}
        return {
            "rollouts": sorted(splits),
            "max_running": sorted({max(1, running // 4), max(1, running // 2), running, 2 * running}),
        }


@dataclass(slots=True)
class Simulation:
    """Simulated runs of some devices; a run that was simulated before is read again."""

    devices: Devices
    experiment: Experiment

    @staticmethod
    def of(devices: Devices, home: Path) -> "Simulation":
        """Its runs are under `home`, in a folder for these devices."""
        text = recipe_yaml(devices.recipe)
        folder = home / f"{zlib.crc32(text.encode()):08x}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "devices.yaml").write_text(text, encoding="utf-8")
        return Simulation(devices, Experiment(str(folder / "devices.yaml"), [], folder, is_virtual=True, draws=False))

    def figures(self, knobs: Knobs, times: int = 1) -> Figures:
        """Of a run with micro-batches that are so many times as large as the recipe's; all GPUs that train share one."""
        recipe, train_gpus = self.devices.recipe, self.devices.train_gpus(knobs)
        micro_tokens = max(1, times * recipe.optimizer.micro_tokens * train_gpus // recipe.emulated.train_gpus)
        settings = {**knobs.settings, "emulated.train_gpus": train_gpus, "optimizer.micro_tokens": micro_tokens}
        folder = "-".join(f"{value}{key.split('.')[1]}" for key, value in settings.items())
        return self.experiment.run(folder, settings).figures

    def best(self, budget: int) -> Knobs:
        """The fastest knobs that a climb of at most `budget` runs finds from the balanced ones."""
        start = self.devices.balanced
        return climb(start, self.devices.ladders(start), lambda knobs: self.figures(knobs).tokens_per_s, budget)

    def micro_batches(self, knobs: Knobs, most: float) -> int:
        """How many times as large micro-batches should be: doubled, up to `most` times, as long as that gains 1 % in tokens/s."""
        times, costs_time = 1, self.devices.recipe.emulated.micro_batch_s > 0
        while costs_time and 2 * times <= most:
            if self.figures(knobs, 2 * times).tokens_per_s < WORTH * self.figures(knobs, times).tokens_per_s:
                break
            times *= 2
        return times
