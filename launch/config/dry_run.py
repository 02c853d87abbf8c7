"""`--dry-run`: the roles, the batch arithmetic and the memory of a recipe, without starting it."""

import sys
from collections.abc import Iterator
from pathlib import Path

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...relay.queue.admission import Admission
from ...relay.queue.schedules import SCHEDULES
from ..placement import count_gpus, count_ranks, place_ranks, visible_devices
from .load import recipe_yaml
from .model_files import ModelFiles

_BYTES = {"float32": 4, "bfloat16": 2}
_VERSIONS_IN_RELAY = 3
_TRAINING_BYTES = 16
"""Per parameter: float32 master weight, gradient, and two moments of AdamW."""


def print_plan(recipe: Recipe, ranks_per_host: int = 0) -> None:
    """Print the plan of a recipe whose policy this program can run. Raises `SettingError`."""
    from .checks import check_family

    if (Path(recipe.model.path) / "config.json").exists():
        check_family(recipe, Path(recipe.model.path))
    sys.stdout.write(describe_run(recipe, ranks_per_host))


def describe_run(recipe: Recipe, ranks_per_host: int = 0) -> str:
    """Roles, batch arithmetic, memory estimate and the resolved recipe, as text; `ranks_per_host` 0 means one host."""
    blocks = (
        ("roles", _roles(recipe, ranks_per_host)),
        ("batch", _batch(recipe)),
        ("memory (estimate)", _memory(recipe)),
    )
    text = "\n\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in blocks)
    recipe_text = "".join(f"  {line}\n" for line in recipe_yaml(recipe).splitlines())
    return f"{text}\n\nrecipe\n{recipe_text}"


def _roles(recipe: Recipe, ranks_per_host: int) -> Iterator[str]:
    world_size = count_ranks(recipe.roles)
    num_gpus = count_gpus()
    for rank, place in enumerate(
        place_ranks(recipe.roles, world_size, ranks_per_host or world_size, recipe.rollout.tp)
    ):
        device = visible_devices(place, num_gpus, recipe.relay.staging_device)
        extra = " + hub" if place.name == "relay-0" else ""
        yield f"rank {rank}  host {place.host}  {place.name + extra:14}  {f'GPU {device}' if device else 'CPU'}"


def _batch(recipe: Recipe) -> Iterator[str]:
    prompts, samples = recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt
    admission = Admission(recipe.batch, recipe.queue, recipe.run.steps, SCHEDULES[recipe.run.schedule])
    capacity = admission.capacity
    longest = prompts * samples * recipe.sampling.max_new_tokens
    bound = "by the queue's capacity alone" if admission.bound is None else admission.bound
    trajectories = prompts * samples
    yield f"{prompts} prompts x {samples} samples = {trajectories} trajectories a step, at most {longest:,} new tokens"
    yield f"{recipe.run.steps} steps = {recipe.run.steps * prompts:,} groups{_epochs(recipe)}"
    yield f"queue of {capacity} groups = {capacity * samples} trajectories; staleness bounded {bound}"
    running = recipe.num_replicas * recipe.generator.max_running
    yield f"{recipe.num_replicas} rollouts x {recipe.generator.max_running} = {running} trajectories decoded together"


def _epochs(recipe: Recipe) -> str:
    if not recipe.data.path.endswith(".jsonl"):
        return ""
    try:
        num_rows = sum(bool(line.strip()) for line in Path(recipe.data.path).read_bytes().splitlines())
    except OSError:
        return ""
    return (
        f" = {recipe.run.steps * recipe.batch.prompts_per_step / max(num_rows, 1):.2f} epochs of {num_rows:,} prompts"
    )


def _memory(recipe: Recipe) -> Iterator[str]:
    try:
        policy = ModelFiles.read(recipe.model.path)
    except SettingError as error:
        yield f"unknown: {error}"
        return
    size = _BYTES[recipe.model.dtype]
    weights = policy.num_parameters * size
    cache = recipe.generator.max_running * policy.context * policy.kv_per_token * size
    actor = policy.num_parameters * _TRAINING_BYTES // recipe.roles.actor
    parameters = f"{policy.num_parameters:,} parameters, {weights / 1e6:,.1f} MB as {recipe.model.dtype}"
    yield f"{parameters}; context {policy.context} tokens"
    yield f"actor    {actor / 1e6:10,.1f} MB each for weights, gradients and moments, and activations on top"
    versions = _VERSIONS_IN_RELAY * weights
    yield f"relay    {versions / 1e6:10,.1f} MB each for {_VERSIONS_IN_RELAY} versions, and rows on top"
    weights, cache = (size / recipe.rollout.tp for size in (weights, cache))
    yield f"rollout  {(weights + cache) / 1e6:10,.1f} MB each, {cache / 1e6:,.1f} of it key-value cache at full context"
