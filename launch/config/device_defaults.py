"""The settings that a recipe leaves to the devices: `model.dtype`, `optimizer.micro_tokens` and `generator.max_running`.

The first host decides at the start of a run. `config.yaml` then has the values, and every process of every host reads them there.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from msgspec import structs

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...trainer.policy.checkpoint_files import CONFIG, find_checkpoint
from ..placement import place_ranks
from .gpus import Gpus
from .load import saved_values
from .memory_plan import MemoryPlan
from .model_files import read_config
from .run_folder import CONFIG_FILE

_HOST_MICRO_TOKENS = 2048
"""`optimizer.micro_tokens` of a host without a GPU: more cost much memory there and gain little time (docs/develop/log.md)."""
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The kernel's names of the instructions that multiply bfloat16 and that PyTorch uses: two of x86, and Arm's."""
_CPU_INFO = Path("/proc/cpuinfo")


def with_device_defaults(recipe: Recipe, gpus: Gpus) -> Recipe:
    """The recipe with the compute type and the micro-batch of these devices, where it names none. Needs no file of the model.

    A run that is resumed keeps the type of its earlier steps on other devices, too.
    """
    if recipe.is_emulated:
        return recipe
    chosen = recipe.model.dtype or _type_of_run(recipe) or _type_of_devices(gpus)
    micro_tokens = recipe.optimizer.micro_tokens or (None if gpus.names else _HOST_MICRO_TOKENS)
    return structs.replace(
        recipe,
        model=structs.replace(recipe.model, dtype=chosen),
        optimizer=structs.replace(recipe.optimizer, micro_tokens=micro_tokens),
    )


def changed_type(recipe: Recipe) -> Iterator[str]:
    """A warning if the run that this recipe continues has computed in another type."""
    before = _type_of_run(recipe)
    if before is not None and recipe.model.compute_type != before:
        yield other_type(recipe, before)


def other_type(recipe: Recipe, before: str) -> str:
    """The warning about steps in `run.dir` that were trained in the type `before` and are trained again in another one."""
    return (
        f"warning: model.dtype={recipe.model.compute_type}: the steps in {recipe.run.dir} were trained with {before}; a replay"
        " of steps with another type than theirs gives other numbers"
    )


def with_slots(recipe: Recipe, gpus: Gpus, hosts: Sequence[int] = ()) -> Recipe:
    """The recipe with its `generator.max_running`, by the memory of the GPUs; `hosts` are the ranks on each.

    It is that of a CPU without GPUs of a known size or without the policy's `config.json`.
    """
    if recipe.generator.max_running is not None or recipe.is_emulated:
        return recipe
    slots = recipe.generator.num_slots
    with suppress(SettingError):
        if gpus.gb:
            config = read_config(find_checkpoint(recipe.model.path, [CONFIG]))
            slots = MemoryPlan(recipe, config, place_ranks(recipe.roles, hosts, recipe.rollout.tp), gpus).slots
    return structs.replace(recipe, generator=structs.replace(recipe.generator, max_running=slots))


def multiplies_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether this CPU has instructions for products of bfloat16. Without them PyTorch converts each number, or uses plain loops."""
    with suppress(OSError):
        lines = (line.split() for line in cpu_info.read_text().splitlines())
        return not _BFLOAT16.isdisjoint(next((words for words in lines if words[:1] in (["flags"], ["Features"])), ()))
    return False


def slow_type(dtype: str) -> Iterator[str]:
    """A warning if this CPU computes slowly in a type: a layer of SmolLM2 takes 4 times as long with AVX-512, 10 and more with AVX2."""
    if dtype == "bfloat16" and not multiplies_bfloat16():
        yield (
            "model.dtype=bfloat16 is several times slower than float32 on this CPU, which has no instructions for it: set"
            " model.dtype=float32"
        )


def _type_of_devices(gpus: Gpus) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if gpus.names or multiplies_bfloat16() else "float32"


def _type_of_run(recipe: Recipe) -> Literal["float32", "bfloat16"] | None:
    """The type of the run that this recipe continues; None without one.

    It is read alone: another version of the program may have written settings that are unknown here.
    """
    if recipe.run.resume != "auto":
        return None
    dtype = saved_values(Path(recipe.run.dir) / CONFIG_FILE, "model").get("dtype")
    return dtype if dtype in ("float32", "bfloat16") else None
