"""`--dry-run`: the roles, the batch arithmetic and the memory of a recipe, and the checks of its start, without starting it."""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from ...comm.errors import SettingError
from ...comm.host_memory import free_bytes, memory_bytes
from ...comm.recipe import DataSettings, Recipe
from ...relay.dataset.opening import open_rows
from ...relay.queue.admission import Admission
from ...relay.queue.schedules import SCHEDULES
from ...trainer.policy.checkpoint_files import CONFIG, find_checkpoint
from ..cores import cores_of, ignored_threads, usable_cores
from ..placement import Placement, place_ranks, staging_gpu, visible_devices
from .device_defaults import slow_type, with_device_defaults, with_slots
from .gpus import Gpus
from .load import recipe_yaml
from .memory_plan import MemoryPlan
from .model_files import read_config
from .prompt_lengths import longest_prompt
from .run_checkpoints import start_lines


@dataclass(frozen=True, slots=True)
class DryRun:
    """The options of a dry run: its output, and the machine that it is for."""

    hosts: Sequence[int] = ()
    """Ranks on each host; by default all are on one."""
    gpus: Gpus | None = None
    """The GPUs of another machine to plan for, whose files are not checked here; None plans for this host. One that is too
    small is an error."""
    unmade: Collection[str] = ()
    """Settings whose files a start makes first."""
    with_settings: bool = False

    def of(self, recipe: Recipe) -> list[str]:
        """Print the plan, then check the recipe as its start does; returns warnings. Raises `SettingError`."""
        from .checks.evaluation import checkpoint_lines
        from .checks.recipe import check_family, check_recipe, check_settings

        recipe = with_slots(with_device_defaults(recipe, self._present), self._present, self.hosts)
        text, refused = self.plan(recipe)
        sys.stdout.write(text)
        sys.stdout.flush()
        sys.stdout.write("".join(f"{line}\n" for line in (*start_lines(recipe), *checkpoint_lines(recipe))))
        if self.gpus is None:
            warnings, num_rows = check_recipe(recipe, unmade=self.unmade)
            warnings += _of_processors(recipe, self._present, self.hosts)
            if recipe.run.resume == "auto":
                from ..resume import choose_point, finished_after

                if finished_after(recipe.run) is None:
                    sys.stdout.write("".join(f"{line}\n" for line in choose_point(recipe).lines))
        else:
            warnings = [*check_settings(recipe), *_of_unused_gpus(recipe, self._present, self.hosts)]
            if (Path(recipe.model.path or "?") / "config.json").exists():
                check_family(recipe.generator, recipe.algorithm, Path(recipe.model.path))
            num_rows = _num_rows(recipe.data)
        sys.stdout.write(_epochs(recipe, num_rows))
        if refused:
            raise SettingError("; ".join(refused))
        return warnings

    def plan(self, recipe: Recipe) -> tuple[str, list[str]]:
        """Roles, batch arithmetic and memory estimate as text, and what a start is refused for. Raises SettingError."""
        places = place_ranks(recipe.roles, self.hosts, recipe.rollout.tp)
        refused: list[str] = []
        try:
            longest = longest_prompt(recipe, self.unmade) if self.gpus is None else None
            config = read_config(find_checkpoint(recipe.model.path, [CONFIG]))
            plan = MemoryPlan(recipe, config, places, self._present, longest)
        except SettingError as error:
            memory = [f"unknown: {error}"]
        else:
            warnings = plan.shortages()
            if self.gpus is None:
                refused, on_host = plan.host_shortages(memory_bytes(), free_bytes())
                warnings += on_host
            else:
                refused = warnings
            memory = [*plan.lines(), *(f"warning: {shortage}" for shortage in warnings)]
        blocks = {
            "roles": _roles(recipe, places, self._present),
            "batch": _batch(recipe),
            "memory (estimate)": memory,
            **({"recipe": recipe_yaml(recipe).splitlines()} if self.with_settings else {}),
        }
        texts = (f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in blocks.items())
        return "\n".join(texts), refused

    @property
    def _present(self) -> Gpus:
        return Gpus.of_this_host() if self.gpus is None else self.gpus


def check_host(recipe: Recipe, hosts: Sequence[int] = ()) -> tuple[list[str], dict[str, float]]:
    """Checks of this host, the first: warnings about its threads and its memory, and the bytes that each process needs at most.

    `hosts` are the ranks of each host, by default of one; the others count as equal to this one. Memory is left out where the
    policy's size is unknown. Raises `SettingError` for what certainly does not fit.
    """
    places = place_ranks(recipe.roles, hosts, recipe.rollout.tp)
    gpus = Gpus.of_this_host()
    warnings = _of_processors(recipe, gpus, hosts)
    try:
        config = read_config(find_checkpoint(recipe.model.path))
        plan = MemoryPlan(recipe, config, places, gpus, longest_prompt(recipe))
    except SettingError:
        return warnings, {}
    refused, on_host = plan.host_shortages(memory_bytes(), free_bytes())
    if refused:
        raise SettingError("; ".join(refused))
    return [*warnings, *on_host], plan.of_processes()


def _of_processors(recipe: Recipe, gpus: Gpus, hosts: Sequence[int] = ()) -> list[str]:
    """Warnings about the threads of this host, the first, a type that is slow on it, and its GPUs without a rank."""
    roles = [place.role for place in place_ranks(recipe.roles, hosts, recipe.rollout.tp) if place.host == 0]
    warnings = [*ignored_threads(cores_of(recipe, roles, has_gpus=bool(gpus.names)))]
    if not gpus.names and not recipe.is_emulated:
        warnings += slow_type(recipe.model.compute_type)
    return warnings + _of_unused_gpus(recipe, gpus, hosts)


def _of_unused_gpus(recipe: Recipe, gpus: Gpus, hosts: Sequence[int]) -> list[str]:
    """A warning about the GPUs of each host that no rank uses; `hosts` are the ranks of each, by default of one."""
    places = place_ranks(recipe.roles, hosts, recipe.rollout.tp)
    by_host: dict[int, set[str]] = defaultdict(set)
    for place in places:
        by_host[place.host].add(visible_devices(place, gpus.names))
    num = len(gpus.names)
    of_relays = recipe.comm.link == "nccl"
    used = max(len(used - {""}) for used in by_host.values())
    unused = num - used - of_relays
    if unused <= 0 or recipe.is_emulated:
        return []
    warning = f"{unused} of {num} GPUs of a host have no rank and stay unused"
    actors, rollouts = _split(recipe, num - of_relays - recipe.roles.reference)
    if not actors or actors + rollouts + recipe.roles.reference <= used:
        return [warning]
    split = f"roles.actor={actors} roles.rollout={rollouts}"
    return [f"{warning}; raise roles.actor and roles.rollout, on one host for example to {split}"]


def _split(recipe: Recipe, num_gpus: int) -> tuple[int, int]:
    """Actors and rollouts for so many GPUs of one host: they use most of them, with about a quarter for the actors. 0 and 0: none fits."""
    tp = recipe.rollout.tp
    whole = recipe.trainer.shard_ranks or 1
    splits = [(actors, (num_gpus - actors) // tp * tp) for actors in range(whole, num_gpus - tp + 1, whole)]
    if recipe.generator.exact:
        splits = [split for split in splits if split[0] == 1]
    quarter = max(1, num_gpus // 4)
    return max(splits, key=lambda split: (sum(split), -abs(split[0] - quarter)), default=(0, 0))


def _roles(recipe: Recipe, places: Sequence[Placement], gpus: Gpus) -> Iterator[str]:
    roles: dict[int, list[str]] = defaultdict(list)
    for place in places:
        roles[place.host].append(place.role)
    hosts = {host: cores_of(recipe, here, has_gpus=bool(gpus.names)) for host, here in roles.items()}
    for rank, place in enumerate(places):
        device = visible_devices(place, gpus.names, staging_gpu(recipe.comm.link, places, place.host, gpus.names))
        extra = " + hub" if place.name == "relay-0" else ""
        threads = hosts[place.host].threads(place.role)
        yield (
            f"rank {rank}  host {place.host}  {place.name + extra:14}  {f'GPU {device}' if device else 'CPU':5}"
            f"  {threads} thread{'s' * (threads > 1)}"
        )
    yield f"threads are for hosts of {usable_cores()} cores, as this one is"


def _batch(recipe: Recipe) -> Iterator[str]:
    """Lines about the arithmetic of a batch."""
    prompts = recipe.batch.prompts_per_step
    samples = recipe.batch.samples_per_prompt
    admission = Admission(recipe.batch, recipe.queue, recipe.run.steps, SCHEDULES[recipe.run.schedule])
    ahead = admission.first_lead
    longest = prompts * samples * recipe.sampling.max_new_tokens
    bound = "not bounded" if admission.bound is None else f"at most {admission.bound}"
    then = ", then as few as keep the trainer busy" if admission.follows_trainer else ""
    trajectories = prompts * samples
    yield f"{prompts} prompts x {samples} samples = {trajectories} trajectories a step, at most {longest:,} new tokens"
    yield f"{recipe.run.steps} steps = {recipe.run.steps * prompts:,} groups"
    yield f"queue of {ahead} groups = {ahead * samples} trajectories{then}; staleness {bound}"
    running = recipe.num_replicas * recipe.generator.num_slots
    yield f"{recipe.num_replicas} rollouts x {recipe.generator.num_slots} = {running} trajectories decoded together"


def _epochs(recipe: Recipe, num_rows: int) -> str:
    """A line with the epochs of the run; "" if `num_rows` is 0, or with weights, under which sets start again at different times."""
    if recipe.data.weights or not num_rows:
        return ""
    num_groups = recipe.run.steps * recipe.batch.prompts_per_step
    return f"run.steps={recipe.run.steps}: {num_groups / num_rows:.2f} epochs of {num_rows:,} prompts\n"


def _num_rows(settings: DataSettings) -> int:
    """The rows of JSONL files that are here, in a plan for another machine; 0 for other data."""
    if not all(path.endswith(".jsonl") for path in settings.paths):
        return 0
    try:
        return sum(len(open_rows(structs.replace(settings, path=path))) for path in settings.paths if path)
    except SettingError:
        return 0
