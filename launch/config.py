"""The recipe: every setting of a run, assembled from the settings of each floor, and how it is read.

A recipe file is YAML; `key=value` words with dotted keys override it. Whatever is wrong with either is a `SettingError`
that names the setting. The resolved recipe is saved as `config.yaml` in the run folder, where each process reads it.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

from ..comm.errors import SettingError
from ..comm.message import MAX_SAMPLES
from ..comm.plugin import is_own
from ..comm.settings import CommSettings, EmulatedSettings, ModelSettings, RunSettings
from ..relay.settings import BatchSettings, DataSettings, QueueSettings, RelaySettings, RepackSettings
from ..rollout.settings import GeneratorSettings, RewardSettings, RolloutSettings, SamplingSettings
from ..trainer.settings import AlgorithmSettings, CheckpointSettings, OptimizerSettings, TrainerSettings

CONFIG_FILE = "config.yaml"

CHOICES: dict[str, tuple[str, ...]] = {
    "run.mode": ("train", "replay"),
    "run.schedule": ("sync", "one_step", "stream", "partial", "headrace"),
    "run.resume": ("never", "auto"),
    "model.dtype": ("float32", "bfloat16"),
    "data.too_long": ("error", "drop"),
    "queue.on_stale": ("wait", "evict"),
    "queue.on_failed": ("keep", "drop"),
    "rollout.engine": ("builtin", "emulated", "transformers"),
    "trainer.engine": ("builtin", "emulated"),
    "repack.transfer": ("auto", "pages", "prefill"),
    "comm.link": ("auto", "shm", "tcp", "nccl"),
}
"""Settings that take one of a few words."""

OPEN_CHOICES = ("rollout.engine", "trainer.engine")
"""Settings that take an object of the user's as well: FILE.py:NAME or package.module:NAME."""

_AT_LEAST: dict[str, float] = {
    "roles.actor": 1, "roles.relay": 1, "roles.rollout": 1, "roles.reference": 0, "roles.task": 0,
    "algorithm.kl_coef": 0, "run.steps": 1, "run.seed": 0,
    "batch.prompts_per_step": 1, "batch.samples_per_prompt": 1, "queue.capacity": 1, "queue.max_staleness": 0,
    "repack.period_s": 0.01, "repack.batch_bound": 1,
    "sampling.max_new_tokens": 1, "sampling.temperature": 0, "sampling.top_p": 0, "sampling.top_k": 0,
    "sampling.min_p": 0, "generator.max_running": 1, "generator.prefill_tokens": 1, "generator.kv_gb": 0, "generator.gpu_share": 0, "rollout.batch_groups": 1, "rollout.tp": 1, "reward.timeout_s": 0,
    "reward.workers": 1, "optimizer.lr": 0, "optimizer.warmup_steps": 0, "optimizer.micro_tokens": 1,
    "optimizer.max_grad_norm": 0, "checkpoint.every": 0, "checkpoint.keep": 1, "comm.heartbeat_s": 0.01,
    "comm.chunk_bytes": 65536, "comm.expiry_s": 0.1, "comm.deadline_s": 0.1, "rollout.report_s": 0,
    "emulated.speed": 1e-3, "emulated.train_gpus": 1, "emulated.stretch": 1, "emulated.p99_over_median": 1,
}  # fmt: skip

_AT_MOST: dict[str, float] = {
    "batch.samples_per_prompt": MAX_SAMPLES,
    "comm.chunk_bytes": 32 << 20,
    "generator.gpu_share": 1,
    "sampling.top_p": 1,
    "sampling.min_p": 1,
    "optimizer.beta1": 1,
    "optimizer.beta2": 1,
}


@dataclass(slots=True)
class RoleSettings:
    """`roles.*`: how many ranks each role has; torchrun starts their sum."""

    actor: int = 1
    """Ranks of the trainer."""
    relay: int = 1
    """CPU processes that hold weights and experience; spread over the hosts first."""
    rollout: int = 1
    """Ranks of the generator; `rollout.tp` of them make one replica."""
    reference: int = 0
    """Ranks of the initial policy for a KL term, each with all of it; 0 lets the trainer's ranks do it."""
    task: int = 0
    """CPU processes for `queue.tasks`."""

    @property
    def num_ranks(self) -> int:
        """Of all roles."""
        return self.actor + self.relay + self.rollout + self.reference + self.task


@dataclass(slots=True)
class Recipe:
    """Every setting of a run; each section belongs to the floor that uses it."""

    run: RunSettings = field(default_factory=RunSettings)
    roles: RoleSettings = field(default_factory=RoleSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    repack: RepackSettings = field(default_factory=RepackSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    relay: RelaySettings = field(default_factory=RelaySettings)
    emulated: EmulatedSettings = field(default_factory=EmulatedSettings)
    comm: CommSettings = field(default_factory=CommSettings)

    @property
    def num_replicas(self) -> int:
        """Replicas of the generator."""
        return self.roles.rollout // self.rollout.tp


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` (None: only defaults) with dotted `key=value` overrides; raises `SettingError`."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.structured(Recipe)
    layers = [(f"{path}: ", _load(Path(path)))] if path is not None else []
    layers += [("", _parse(word)) for word in overrides]
    for origin, layer in layers:
        _refuse_unknown(layer, origin)
        try:
            config = OmegaConf.merge(config, layer)
        except OmegaConfBaseException as error:
            raise SettingError(_explain(error, layer)) from error
    assert isinstance(config, DictConfig)
    try:
        recipe = cast(Recipe, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        raise SettingError(_explain(error, {})) from error
    _refuse_values(recipe)
    return recipe


def save_recipe(recipe: Recipe) -> Path:
    """Writes the resolved recipe into its run folder and returns the file."""
    path = Path(recipe.run.dir) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe_yaml(recipe))
    return path


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `read_recipe` reads."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def setting_names() -> list[str]:
    """The dotted names of all settings, in the recipe's order."""
    return [f"{section}.{entry.name}" for section, kind in sections() for entry in fields(kind)]


def sections() -> Iterator[tuple[str, type]]:
    """Name and dataclass of each section of the recipe."""
    yield from get_type_hints(Recipe).items()


def _load(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SettingError(f"no recipe file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read the recipe {str(path)!r}: {error}") from error
    except yaml.YAMLError as error:
        raise SettingError(f"the recipe {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded or {}, dict):
        raise SettingError(f"the recipe {str(path)!r} must be a mapping of sections, such as `run:`")
    return loaded or {}


def _parse(word: str) -> Mapping[str, Any]:
    """`a.b=c` as nested mappings; the text stays text (the setting's type decides what it means), but for `null`."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise SettingError(f"{word!r} is no override; write key=value, such as run.steps=200")
    value: Any = None if text == "null" else text
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _refuse_unknown(layer: Mapping[str, Any], origin: str) -> None:
    known = setting_names()
    section_names = [name for name, _ in sections()]
    for section, values in layer.items():
        if section not in section_names:
            keys = [f"{section}.{key}" for key in values] if isinstance(values, dict) else [str(section)]
            raise SettingError(
                f"{origin}unknown setting {(keys or [section])[0]!r}{_nearest((keys or [section])[0], known)}"
            )
        if not isinstance(values, dict):
            raise SettingError(
                f"{origin}{section!r} is a section; set one of its settings, such as {section}.{_first(section)}"
            )
        for key, value in values.items():
            name = f"{section}.{key}"
            if name not in known:
                raise SettingError(f"{origin}unknown setting {name!r}{_nearest(name, known)}")
            if isinstance(value, dict):
                raise SettingError(f"{origin}{name} is one value and has no settings of its own")


def _first(section: str) -> str:
    return fields(dict(sections())[section])[0].name


def _nearest(name: str, known: Sequence[str]) -> str:
    leaf = name.rpartition(".")[2]
    near = [other for other in known if other.endswith(f".{leaf}")] or difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {near[0]!r}" if near else "; --help lists all settings"


def _explain(error: Exception, layer: Mapping[str, Any]) -> str:
    name = getattr(error, "full_key", None) or next(iter(layer), "recipe")
    section, _, key = name.partition(".")
    hint = get_type_hints(dict(sections()).get(section, Recipe)).get(key)
    value = layer.get(section, {}).get(key)
    if hint is None or value is None and key not in layer.get(section, {}):
        return f"{name}: {str(error).splitlines()[0]}"
    return f"{name} takes {kind_name(hint)}, not {'null' if value is None else repr(value)}"


def kind_name(kind: Any) -> str:
    """How a setting's type is told to a user: int, float, str, true/false, or null."""
    names = {bool: "true or false", type(None): "null"}
    members = getattr(kind, "__args__", (kind,))
    return " or ".join(names.get(member, getattr(member, "__name__", str(member))) for member in members)


def _refuse_values(recipe: Recipe) -> None:
    for name in setting_names():
        section, _, key = name.partition(".")
        value = getattr(getattr(recipe, section), key)
        if name in CHOICES and value not in CHOICES[name] and not (name in OPEN_CHOICES and is_own(value)):
            raise SettingError(f"{name}={value} is none of {', '.join(CHOICES[name])}")
        if value is None:
            continue
        if name in _AT_LEAST and not value >= _AT_LEAST[name]:
            raise SettingError(f"{name}={value} must be at least {_AT_LEAST[name]:g}")
        if name in _AT_MOST and not value <= _AT_MOST[name]:
            raise SettingError(f"{name}={value} must be at most {_AT_MOST[name]:g}")
    if recipe.roles.rollout % recipe.rollout.tp:
        raise SettingError(
            f"roles.rollout={recipe.roles.rollout} ranks make no whole replicas of rollout.tp={recipe.rollout.tp} ranks"
        )
