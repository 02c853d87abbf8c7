"""The devices that a plan divides, and where its search begins."""

from dataclasses import dataclass
from statistics import fmean

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from .emulated.device import EmulatedDevice, response_length
from .settings import lab_of
from .tuning import Knobs, Ladder

SAMPLE = 256
"""Responses whose lengths give the mean ones."""


@dataclass(frozen=True, slots=True)
class Devices:
    """A recipe on emulated devices, and how many of them there are."""

    recipe: Recipe
    num_gpus: int

    @staticmethod
    def of(recipe: Recipe, num_gpus: int | None = None) -> "Devices":
        """The devices of an emulated recipe, or `num_gpus` like them. Raises `SettingError` for too few."""
        e = lab_of(recipe.lab)
        if e.colocated:
            raise SettingError("lab.colocated: colocated devices have no split to plan")
        total = e.train_gpus + e.gpus_per_rollout * recipe.roles.rollout if num_gpus is None else num_gpus
        if total <= e.gpus_per_rollout:
            raise SettingError(f"--gpus: {total} are too few; a trainer needs 1 and a rollout {e.gpus_per_rollout}")
        return Devices(recipe, total)

    @property
    def most_rollouts(self) -> int:
        return (self.num_gpus - 1) // lab_of(self.recipe.lab).gpus_per_rollout

    def train_gpus(self, knobs: Knobs) -> int:
        return self.num_gpus - lab_of(self.recipe.lab).gpus_per_rollout * knobs.rollouts

    @property
    def own(self) -> Knobs:
        """The split of the recipe."""
        return Knobs(self.recipe.roles.rollout, self.recipe.generator.num_slots)

    @property
    def balanced(self) -> Knobs:
        """The split at which full rollouts generate as fast as the trainer trains, by means alone: the climb's start."""
        recipe = self.recipe
        e = lab_of(self.recipe.lab)
        longest = recipe.sampling.max_new_tokens
        most = recipe.generator.num_slots
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
        step = max(1, start.rollouts // 16)
        running = start.max_running
        splits = {start.rollouts, *range(start.rollouts % step or step, self.most_rollouts + 1, step)}
        return {
            "rollouts": sorted(splits),
            "max_running": sorted({max(1, running // 4), max(1, running // 2), running, 2 * running}),
        }
