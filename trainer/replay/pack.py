"""A pack: one step of a run in one file, for a report of a bug. Elsewhere its loss and the norm of its gradient repeat.

It is a ZIP archive without compression:

    pack.json                      `Pack`: version, machine, settings, and the digest of the weights
    metrics.jsonl                  the numbers of the step that are compared, as the replay that wrote the pack computed them
    rows/step_N[.R].safetensors    the rows of each rank, with the columns that training reads
    model/...                      the weights before the step, in Hugging Face format and without an adapter
    adapter/...                    the adapter, in peft's format
    critic.safetensors             the trained weights of the critic
    optimizer.safetensors          the optimizer's moments, if the step has several updates: all but the first depend on them

Of the settings it has only those that `_SETTINGS` and `_SECTIONS` list, so no address of a reward, no environment and no secret. An unpacked
archive is a run folder for a replay. Nothing in it is run: of the user's own functions and folders it has the names, and the receiver
gives the files.
"""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import msgspec
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ...comm.disk import is_unwritable
from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ..actor_group import gather_full
from ..batch import Trajectory
from ..export import save_policy
from ..learners.actor import Actor
from ..policy.adapter_files import AdapterBase, write_adapter
from ..policy.lora import is_adapter
from ..step_log import StepReplay
from .comparison import COMPARED
from .start import METRICS

FORMAT = 1
"""The form of packs that this version writes and reads."""
COLUMNS = frozenset({"truncated", *(column.name for column in fields(Trajectory))})
"""The columns of rows that training reads; a reward's notes stay with the user."""
_HEAD = "pack.json"
_HEAD_BYTES = 1 << 20
"""Most bytes of the head, which is parsed in memory; it has about 3,000."""
_MODEL = "model"
_ADAPTER = "adapter"
_CRITIC = "critic.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_NAMES = re.compile(
    rf"pack\.json|{METRICS}|(critic|optimizer)\.safetensors|rows/step_\d+(\.\d+)?\.safetensors|(model|adapter)/\w[\w.-]*"
)
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "run": ("seed", "steps"),
    "roles": ("actor",),
    "model": ("dtype",),
    "batch": ("prompts_per_step", "samples_per_prompt", "updates_per_version", "passes"),
    "sampling": ("max_new_tokens", "temperature"),
    "generator": ("exact",),
    "trainer": ("activation_checkpointing", "offload", "shard_ranks"),
    "lora": ("rank", "alpha", "targets"),
}
"""The settings that decide the gradient of saved rows, beside those of `_SECTIONS`."""
_SECTIONS = ("algorithm", "optimizer", "critic")
_WEIGHTS_ELSEWHERE = (("model", "path"), ("lora", "path"))
"""Settings that a pack without weights has too: the receiver must have what they name. Of a folder of the sender's they have the name alone."""


_DAMAGES = (
    BadZipFile, KeyError, EOFError, OSError, OverflowError, RuntimeError, ValueError, TypeError, struct.error, msgspec.MsgspecError,
)  # fmt: skip
"""The errors of reading an archive if it is another file, was cut short or is damaged."""


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a pack; `step` counts from 0."""

    format: int = FORMAT
    version: str
    """Of Headrace."""
    step: int
    machine: dict[str, str]
    settings: dict[str, dict[str, Any]]
    weights: Annotated[str, msgspec.Meta(min_length=1)]
    """Their digest, by `weights_digest`."""
    has_weights: bool

    def recipe(self, folder: Path) -> Recipe:
        """The settings for a replay of the pack that is unpacked in `folder`. Raises `SettingError`."""
        try:
            recipe = msgspec.convert(self.settings, Recipe)
        except msgspec.ValidationError as error:
            raise SettingError(
                f"the pack was written by Headrace {self.version}, with other settings: {error}"
            ) from error
        replace = msgspec.structs.replace
        recipe = replace(recipe, run=replace(recipe.run, dir=str(folder)))
        if not self.has_weights:
            return recipe
        adapter = str(folder / _ADAPTER) if recipe.lora.rank else ""
        return replace(
            recipe,
            model=replace(recipe.model, path=str(folder / _MODEL)),
            lora=replace(recipe.lora, path=adapter),
        )


class _Head(msgspec.Struct, frozen=True):
    format: int
    version: str


def settings_of(recipe: Recipe, *, has_weights: bool) -> dict[str, dict[str, Any]]:
    """The settings of a recipe that a pack has."""
    every = msgspec.to_builtins(recipe)
    found = {section: {name: every[section][name] for name in names} for section, names in _SETTINGS.items()}
    found |= {section: every[section] for section in _SECTIONS}
    own = {name: text for name, text in found["algorithm"].items() if isinstance(text, str) and ".py:" in text}
    found["algorithm"] |= {name: Path(function).name for name, function in own.items()}
    if not has_weights:
        for section, name in _WEIGHTS_ELSEWHERE:
            path = Path(given := every[section][name])
            found[section][name] = path.name if path.is_absolute() else given
    return found


def machine() -> dict[str, str]:
    """The properties of a machine on which the last bits of a sum depend."""
    found = {"torch": str(torch.__version__), "device": "cpu"}
    if torch.cuda.is_available():
        return found | {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found | {"processor": names[0] if names else "", "instructions": torch.backends.cpu.get_cpu_capability()}


def weights_digest(actor: Actor) -> str:
    """An xxh3 of the names, types, shapes and bytes of all weights of policy and critic; a collective."""
    state = xxhash.xxh3_64()
    for name, tensor in _whole_weights(actor):
        state.update(f"{name} {tensor.dtype} {[*tensor.shape]} ".encode())
        state.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def has_moments(recipe: Recipe) -> bool:
    """Whether a pack needs the optimizer's moments beside the weights."""
    return recipe.batch.updates_per_version * recipe.batch.passes > 1


def write_state(actor: Actor, folder: Path) -> None:
    """Rank 0 writes all weights into the folder of a pack, and the moments if it needs them; a collective."""
    if has_moments(actor.recipe) and actor.updater.optimizer.state:  # it has none before its first step
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_optimizer_state_dict(actor.state.model, actor.state.optimizer, options=whole)
        moments: Any = found.get("state", {})  # rank 0 alone has them
        named = {f"{name}/{key}": value for name, values in moments.items() for key, value in values.items()}
        if actor.group.is_lead:
            save_file({name: value.contiguous() for name, value in named.items()}, folder / _OPTIMIZER)
    _write_weights(actor, folder)


def _write_weights(actor: Actor, folder: Path) -> None:
    whole = {name: tensor for name, tensor in _whole_weights(actor) if actor.group.is_lead}
    if not actor.group.is_lead:
        return
    critic = {name.removeprefix(_OF_CRITIC): whole.pop(name) for name in [*whole] if name.startswith(_OF_CRITIC)}
    adapter = {name: whole.pop(name) for name in [*whole] if is_adapter(name)}
    save_policy(actor.policy, folder / _MODEL, weights=whole)
    config = folder / _MODEL / "config.json"
    named = json.loads(config.read_text(encoding="utf-8"))
    named.pop("_name_or_path", None)  # a folder of the sender's
    config.write_text(json.dumps(named, indent=2), encoding="utf-8")
    if adapter:
        write_adapter(folder / _ADAPTER, adapter, actor.recipe.lora, AdapterBase(""))
    if critic:
        save_file({name: tensor.contiguous() for name, tensor in critic.items()}, folder / _CRITIC)


def load_state(actor: Actor, folder: Path) -> None:
    """Give the critic its weights, and the optimizer its moments, if an unpacked pack has some; a collective."""
    whole = StateDictOptions(full_state_dict=True, strict=False)  # frozen weights are not in the files
    if (folder / _OPTIMIZER).exists():
        state: Any = get_optimizer_state_dict(actor.state.model, actor.state.optimizer, options=whole)
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for place, value in load_file(folder / _OPTIMIZER).items():
            name, _, key = place.rpartition("/")
            moments[name][key] = value
        state["state"] = dict(moments)
        set_optimizer_state_dict(actor.state.model, actor.state.optimizer, state, options=whole)
    if (folder / _CRITIC).exists() and actor.critic is not None:
        weights: dict[str, Any] = {**load_file(folder / _CRITIC)}
        set_model_state_dict(actor.critic.model, weights, options=whole)


_OF_CRITIC = "critic."


def _whole_weights(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the policy, and each that is trained of the critic, whole and in host memory, one at a time; a collective."""
    named = actor.policy.weights()
    if actor.critic is not None:
        trained = actor.critic.model.named_parameters()
        named |= {f"{_OF_CRITIC}{name}": parameter for name, parameter in trained if parameter.requires_grad}
    for name, parameter in named.items():
        yield name, gather_full(parameter.detach()).cpu()


def write_pack(path: Path, pack: Pack, numbers: Mapping[str, float], run_dir: Path, folder: Path) -> None:
    """Write a pack; it has its name once it is whole. `folder` has the weights, if it has some, and gets the rest."""
    for rank in range(pack.settings["roles"]["actor"]):
        StepReplay(run_dir, pack.step, rank).copy_to(folder, COLUMNS)
    (folder / METRICS).write_text(json.dumps({"step": pack.step, **numbers}) + "\n", encoding="utf-8")
    head = json.dumps(msgspec.to_builtins(pack), indent=2)  # it writes infinity, which a bound may be
    (folder / _HEAD).write_text(head, encoding="utf-8")
    new = path.with_name(f"{path.name}.new")
    try:
        with ZipFile(new, "w", ZIP_STORED) as archive:
            for file in sorted(file for file in folder.rglob("*") if file.is_file()):
                archive.write(file, file.relative_to(folder))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def opened_pack(path: Path) -> Iterator[tuple[Pack, Path]]:
    """A pack, and the folder in which it is unpacked meanwhile. Raises `SettingError` for one that is cut short, damaged or of another version."""
    with TemporaryDirectory() as folder:
        yield _unpack(path, Path(folder)), Path(folder)


def _unpack(path: Path, folder: Path) -> Pack:
    try:
        with ZipFile(path) as archive:
            _check_entries(path, archive.infolist())
            head = json.loads(archive.read(_HEAD))
            found = msgspec.convert(head, _Head)
            if found.format != FORMAT:
                raise SettingError(
                    f"{path} was written by Headrace {found.version} in form {found.format} of packs; this version reads form {FORMAT}"
                )
            pack = msgspec.convert(head, Pack)
            _check_settings(path, pack)
            archive.extractall(folder)  # it checks the sum of each file
    except SettingError:
        raise
    except _DAMAGES as error:
        if isinstance(error, OSError) and is_unwritable(error):  # the disk of the folder, not the pack
            raise
        raise SettingError(
            f"{path} is not a whole pack of `headrace replay --pack`: {error}; it may be cut short or damaged"
        ) from error
    return pack


def _check_entries(path: Path, entries: Sequence[ZipInfo]) -> None:
    """Raise `SettingError` unless a pack has such files, and they need no more memory and disk than it has bytes. It reads none of them."""
    for entry in entries:
        why = ""
        if not _NAMES.fullmatch(entry.filename):
            why = f"it has {entry.filename}"
        elif entry.compress_type != ZIP_STORED:
            why = f"{entry.filename} is compressed"
        elif entry.filename == _HEAD and entry.file_size > _HEAD_BYTES:
            why = f"{_HEAD} has {entry.file_size:,} bytes, and {_HEAD_BYTES:,} are allowed"
        if why:
            raise SettingError(f"{path} is not a pack of `headrace replay --pack`: {why}")
    if (unpacked := sum(entry.file_size for entry in entries)) > (size := path.stat().st_size):  # files may overlap
        raise SettingError(
            f"{path} is not a pack of `headrace replay --pack`: its files have {unpacked:,} bytes, and it has {size:,}"
        )


def _check_settings(path: Path, pack: Pack) -> None:
    """Raise `SettingError` for a setting that `settings_of` does not write: a receiver's replay would obey it."""
    allowed = {(section, name) for section, names in _SETTINGS.items() for name in names}
    allowed |= set(() if pack.has_weights else _WEIGHTS_ELSEWHERE)
    for section in pack.settings.keys() - set(_SECTIONS):
        others = [f"{section}.{name}" for name in pack.settings[section] if (section, name) not in allowed]
        if others or section not in _SETTINGS:
            raise SettingError(
                f"{path} was written by Headrace {pack.version}, with other settings than packs of this version: {[*others, section][0]}"
            )


def recorded_numbers(folder: Path, step: int) -> Mapping[str, float]:
    """The numbers of the step of the pack that is unpacked in `folder`, which counts from 0. Raises `SettingError` if one is missing."""
    try:
        row = msgspec.convert(json.loads((folder / METRICS).read_text(encoding="utf-8")), dict[str, Any])
    except _DAMAGES as error:
        raise SettingError(f"the pack is damaged: {METRICS} cannot be read: {error}") from error
    if row.get("step") != step:
        raise SettingError(f"the pack is damaged: {METRICS} has no numbers of step {step + 1}")
    for name in COMPARED:
        if not isinstance(row.get(name), int | float):
            raise SettingError(f"the pack is damaged: {METRICS} has no number {name}")
    return {name: row[name] for name in COMPARED}
