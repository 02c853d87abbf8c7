"""The knobs of the entrants of a comparison, those that tuning has found, and the values that it tries.

The knobs are the split of the GPUs, the trajectories that a rollout decodes together, and the length of the queue.
A knob that an entrant ignores is not tried: a barrier has a queue of its own, and colocated devices have no split.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from headrace.launch.lab.tuning import Ladder
from headrace.relay.queue.schedules import SCHEDULES

MAX_RUNNING = (None, 384, 256, 192, 128, 96, 64)
BATCHES_QUEUED = (8, 4, 2)
_MOVES = 4
"""Moves of the split in each direction."""
KNOBS = ("roles.rollout", "generator.max_running", "queue.lead")
"""The settings of `Knobs`, in the order of its fields."""
_SIZES = ("lab.train_gpus", "lab.profile", "batch.prompts_per_step")
"""Settings that are in the key of tuned knobs, or change nothing of their runs."""


class Knobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of one entrant; None leaves the choice to the recipe."""

    rollouts: int
    max_running: int | None = None
    lead: int | None = None

    @property
    def settings(self) -> dict[str, int]:
        return {key: value for key, value in zip(KNOBS, structs.astuple(self), strict=True) if value is not None}

    def without(self, overrides: Sequence[str]) -> "Knobs":
        """The knobs with those of a recipe's overrides (KEY=VALUE) left to it; `roles.rollout` has to be a number."""
        given = dict(word.split("=", 1) for word in overrides)
        left = {field: None for field, key in zip(self.__struct_fields__, KNOBS, strict=True) if key in given}
        if "rollouts" in left:
            return structs.replace(self, **{**left, "rollouts": int(given[KNOBS[0]])})
        return structs.replace(self, **left)

    def __str__(self) -> str:
        """The knobs that are set beside the split."""
        return " ".join(f"{key}={value}" for key, value in list(self.settings.items())[1:])


Tuned = dict[str, dict[str, dict[str, Knobs]]]
"""Knobs by profile of the devices, by their number and batch (see `key_of`), and by entrant."""


def ladders(entrant: str, start: Knobs, most_rollouts: int, groups: int) -> dict[str, Ladder]:
    """The values to try for each knob that an entrant has, around its present split; a batch has `groups` groups."""
    step = max(1, start.rollouts // 16)
    splits = [start.rollouts + step * move for move in range(-_MOVES, _MOVES + 1)]
    found: dict[str, Ladder] = {"max_running": MAX_RUNNING}
    if entrant in SCHEDULES:
        found = {"rollouts": [split for split in splits if 0 < split < most_rollouts], **found}
    if entrant in SCHEDULES and SCHEDULES[entrant].staleness is None:
        found["lead"] = (None, *(batches * groups for batches in BATCHES_QUEUED))
    begun = {name: getattr(start, name) for name in found}
    return {name: _with_value(ladder, begun[name]) for name, ladder in found.items()}


def starts(entrant: str, own: Knobs, most_rollouts: int) -> list[Knobs]:
    """Where the climbs of an entrant begin: at its own knobs, and at more rollouts with fewer trajectories each.

    The second one is for entrants that compute caches again with each version: neither knob alone gains there.
    """
    more = structs.replace(own, rollouts=min(most_rollouts - 1, own.rollouts * 9 // 8 + 1), max_running=96)
    return [own, more] if entrant == "partial" and more.rollouts > own.rollouts else [own]


def _with_value(ladder: Ladder, value: int | None) -> Ladder:
    """A ladder with a value in its place, so that a climb that begins there has both neighbours; None is first."""
    if value in ladder:
        return ladder
    if value is None:
        return (None, *ladder)
    numbers = [number for number in ladder if number is not None]
    is_descending = numbers == sorted(numbers, reverse=True)
    return (*ladder[: len(ladder) - len(numbers)], *sorted([*numbers, value], reverse=is_descending))


def key_of(num_gpus: int, groups: int) -> str:
    """The place of some devices in a file of tuned knobs; with 0 groups a batch grows with the devices."""
    return f"{num_gpus}-{groups}groups" if groups else str(num_gpus)


def other_devices(overrides: Sequence[str]) -> list[str]:
    """The overrides (KEY=VALUE) that make a recipe one of other devices, batches or lengths than its tuned knobs are for."""
    keys = [word.partition("=")[0] for word in overrides]
    return [key for key in keys if key.startswith(("lab.", "batch.", "sampling.")) and key not in _SIZES]


def tuned_file(recipe: str) -> Path:
    """The file of tuned knobs beside a recipe."""
    return Path(recipe).with_suffix(".tuned.json")


def read_tuned(recipe: str) -> Tuned:
    """The knobs found when this recipe was tuned; empty before that."""
    path = tuned_file(recipe)
    return msgspec.json.decode(path.read_bytes(), type=Tuned) if path.exists() else {}


def save_tuned(recipe: str, profile: str, key: str, entrant: str, knobs: Knobs) -> None:
    """Keep the knobs of an entrant beside those of others."""
    found = read_tuned(recipe)
    found.setdefault(profile, {}).setdefault(key, {})[entrant] = knobs
    tuned_file(recipe).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
