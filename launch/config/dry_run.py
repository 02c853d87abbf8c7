"""`--dry-run`: the roles, the batch arithmetic and the memory of a recipe, without starting it."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...relay.dataset.rows import JsonLines
from ...relay.queue.admission import Admission
from ...relay.queue.schedules import SCHEDULES
from ...trainer.policy.checkpoint_files import find_checkpoint
from ..placement import Placement, count_ranks, place_ranks, visible_devices
from .gpus import Gpus
from .load import recipe_yaml
from .memory_plan import MemoryPlan
from .model_files import read_config


def print_plan(recipe: Recipe, hosts: Sequence[int] = (), gpus: Gpus | None = None) -> None:
    """Print the plan of a recipe whose policy this program can run. Raises `SettingError`."""
    from .checks import check_family

    if recipe.model.path and (Path(recipe.model.path) / "config.json").exists():
        check_family(recipe, Path(recipe.model.path))
    sys.stdout.write(describe_run(recipe, hosts, gpus))


def describe_run(recipe: Recipe, hosts: Sequence[int] = (), gpus: Gpus | None = None) -> str:
    """Roles, batch arithmetic, memory estimate and the resolved recipe, as text.

    `hosts` are the numbers of ranks on each, by default all on one; `gpus` are those to plan for, by default this host's. Raises SettingError where a GPU
    that is to be planned for is too small; on this host's it is a line of the text.
    """
    places = place_ranks(recipe.roles, hosts or [count_ranks(recipe.roles)], recipe.rollout.tp)
    present = Gpus.of_this_host() if gpus is None else gpus
    try:
        plan = MemoryPlan(recipe, read_config(find_checkpoint(recipe.model.path)), places, present)
    except SettingError as error:
        memory = [f"unknown: {error}"]
    else:
        shortages = plan.shortages()
        if gpus is not None and shortages:
            raise SettingError("; ".join(shortages))
        memory = [*plan.lines(), *(f"warning: {shortage}" for shortage in shortages)]
    blocks = (
        ("roles", _roles(recipe, places, present)),
        ("batch", _batch(recipe)),
        ("memory (estimate)", memory),
    )
    text = "\n\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in blocks)
    recipe_text = "".join(f"  {line}\n" for line in recipe_yaml(recipe).splitlines())
    return f"{text}\n\nrecipe\n{recipe_text}"


def _roles(recipe: Recipe, places: Sequence[Placement], gpus: Gpus) -> Iterator[str]:
    for rank, place in enumerate(places):
        device = visible_devices(place, gpus.names, recipe.relay.staging_device)
        extra = " + hub" if place.name == "relay-0" else ""
        yield f"rank {rank}  host {place.host}  {place.name + extra:14}  {f'GPU {device}' if device else 'CPU'}"


def _batch(recipe: Recipe) -> Iterator[str]:
    prompts, samples = recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt
    admission = Admission(recipe.batch, recipe.queue, recipe.run.steps, SCHEDULES[recipe.run.schedule])
    ahead = admission.first_lead
    longest = prompts * samples * recipe.sampling.max_new_tokens
    bound = "not bounded" if admission.bound is None else f"at most {admission.bound}"
    then = ", then as few as keep the trainer busy" if admission.follows_trainer else ""
    trajectories = prompts * samples
    yield f"{prompts} prompts x {samples} samples = {trajectories} trajectories a step, at most {longest:,} new tokens"
    yield f"{recipe.run.steps} steps = {recipe.run.steps * prompts:,} groups{_epochs(recipe)}"
    yield f"queue of {ahead} groups = {ahead * samples} trajectories{then}; staleness {bound}"
    running = recipe.num_replicas * recipe.generator.max_running
    yield f"{recipe.num_replicas} rollouts x {recipe.generator.max_running} = {running} trajectories decoded together"


def _epochs(recipe: Recipe) -> str:
    if recipe.data.streaming or recipe.data.weights or not all(path.endswith(".jsonl") for path in recipe.data.paths):
        return ""
    try:
        num_rows = sum(len(JsonLines(Path(path))) for path in recipe.data.paths)
    except SettingError:
        return ""
    return (
        f" = {recipe.run.steps * recipe.batch.prompts_per_step / max(num_rows, 1):.2f} epochs of {num_rows:,} prompts"
    )
