"""Files of an adapter in the format of `peft`: `adapter_config.json` and `adapter_model.safetensors`.

A checkpoint has one beside the merged policy, and `lora.path` names one to begin with.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.recipe import LoraSettings
from ...relay.checkpoints import share_by_umask, write_durably
from .checkpoint_files import weights_digest
from .lora import ALL_LINEAR, A, B, merged

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_START = "start_adapter"
"""The copy in the run's folder of the adapter that it began with."""
_PREFIX = "base_model.model."
"""Before the name of a matrix, which is `<layer>.lora_A` or `<layer>.lora_B`."""
_SUFFIX = ".weight"
"""After the name of a matrix."""
_BASE_DIGEST = "base_xxh3"
"""Key in the metadata of the weights; other programs ignore it."""
_SETTINGS = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
_OTHER_FORMULAS = (
    "use_dora", "use_rslora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern",
    "modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
    "kasa_config", "arrow_config", "monteclora_config",
)  # fmt: skip
"""Settings of `peft` by which an adapter makes other weights than W0 + alpha / r * B A, or more of them."""
_SAME_BASE = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
"""Initialisations (`init_lora_weights`, in any case) that leave the base weights under the adapter as they are; others change them."""


class AdapterBase(NamedTuple):
    """The weights below an adapter: `model.path`, and their digest when they were loaded ("" on a rank that does not check)."""

    path: str
    digest: str = ""

    @staticmethod
    def read(path: str) -> "AdapterBase":
        """The digest of the checkpoint's present weights; every byte is read."""
        return AdapterBase(path, weights_digest(path))


def merged_weight(name: str, weight: Tensor, adapter: Mapping[str, Tensor], scaling: float) -> Tensor:
    """A weight of a model with its part of the adapter in it, in fp32; one without such a part as it is."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or f"{layer}.{A}" not in adapter:
        return weight
    return merged(weight.float(), adapter[f"{layer}.{A}"], adapter[f"{layer}.{B}"], scaling)


def write_adapter(folder: Path, weights: Mapping[str, Tensor], settings: LoraSettings, base: AdapterBase) -> None:
    """Write the matrices of an adapter, by `lora.adapter_weights`'s names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        **_identity(weights, settings),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {f"{_PREFIX}{name}{_SUFFIX}": weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt", _BASE_DIGEST: base.digest})
    share_by_umask(folder / _WEIGHTS)


def _identity(names: Iterable[str], settings: LoraSettings) -> dict[str, object]:
    """Rank, alpha and targets of an adapter, in peft's terms."""
    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in names}
    chosen = (settings.targets,) if isinstance(settings.targets, str) else settings.targets
    targets = sorted(layers if settings.targets == ALL_LINEAR else chosen)
    return {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": targets}


def check_adapter(folder: Path, names: Iterable[str], settings: LoraSettings, base: AdapterBase) -> None:
    """Raise `SettingError` if the adapter of a checkpoint has other settings or another base: it would make other weights."""
    if not (folder / _CONFIG).exists():
        return  # the checkpoint is of a run without an adapter, and does not load
    saved = _read_config(folder, "run.resume")
    for key, value in _identity(names, settings).items():
        if (found := saved.get(key)) != value:
            raise SettingError(f"lora.{_SETTINGS[key]}: the checkpoint {folder.parent} has {found}, not {value}")
    try:
        _check_base(folder, base)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"run.resume: {folder / _WEIGHTS} is not a complete safetensors file ({error})") from error


def start_folder(run_dir: str, settings: LoraSettings) -> Path:
    """The folder of the adapter that a run begins with: `lora.path`, or the copy of one that has begun, which the run keeps."""
    copy = Path(run_dir) / _START
    has_begun = (copy.parent / "journal.jsonl").exists()
    return copy if has_begun and (copy / _CONFIG).exists() else Path(settings.path)


def keep_start(run_dir: str, settings: LoraSettings) -> None:
    """Copy the adapter of `lora.path` into the run's folder, unless the run has begun and has it."""
    source = start_folder(run_dir, settings)
    copy = Path(run_dir) / _START
    if source != copy:
        copy.mkdir(exist_ok=True)
        for name in (_WEIGHTS, _CONFIG):
            write_durably(copy / name, (source / name).read_bytes())


def has_other_start(run_dir: str, settings: LoraSettings) -> bool:
    """Whether a run that has begun did so with another adapter than that of `lora.path`, or without; not if that one is gone."""
    copy = Path(run_dir) / _START
    source = Path(settings.path)
    if not settings.path or not (copy / _CONFIG).exists():
        return bool(settings.path) != (copy / _CONFIG).exists()
    both = [(source / name, copy / name) for name in (_WEIGHTS, _CONFIG)]
    return any(given.exists() and given.read_bytes() != kept.read_bytes() for given, kept in both)


def start_adapter(
    shapes: Mapping[str, Tensor], settings: LoraSettings, folder: Path, base: AdapterBase
) -> dict[str, Tensor]:
    """The matrices of the adapter that a run begins with, by the names of `shapes` (`lora.adapter_shapes`).

    Raises `SettingError` for an adapter of another formula, rank, alpha or base, or of other layers.
    """
    saved = _read_config(folder, "lora.path")
    _check_formula(folder, saved)
    for key in ("r", "lora_alpha"):
        name = _SETTINGS[key]
        if saved.get(key) != (value := getattr(settings, name)):
            raise SettingError(f"lora.{name}: the adapter at lora.path={folder} has {saved.get(key)}, not {value}")
    try:
        found = read_adapter(folder)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"lora.path: {folder / _WEIGHTS} is not a complete safetensors file ({error})") from error
    if found.keys() != shapes.keys():
        raise SettingError(
            f"lora.targets: the adapter at lora.path={folder} has {_layers(found)}, but the run's has {_layers(shapes)}"
        )
    for name, shape in shapes.items():
        if found[name].shape != shape.shape:
            sizes = f"{list(found[name].shape)} in {folder}, and {list(shape.shape)} by model.path"
            raise SettingError(f"lora.path: {name} has the shape {sizes}")
        if not found[name].isfinite().all():
            raise SettingError(f"lora.path: {name} in {folder} has values that are not finite")
    _check_base(folder, base)
    return {name: tensor.float() for name, tensor in found.items()}


def _read_config(folder: Path, setting: str) -> dict[str, Any]:
    """The configuration of an adapter; SettingError, which names the setting, for a damaged one."""
    try:
        saved = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"{setting}: {folder} has no {_CONFIG} of an adapter ({error})") from error
    if not isinstance(saved, dict):
        raise SettingError(f"{setting}: {folder / _CONFIG} is not the configuration of an adapter: it has no settings")
    return saved


def _check_formula(folder: Path, saved: Mapping[str, Any]) -> None:
    """Raise `SettingError` for the configuration of an adapter of another formula."""
    changes = {key: value for key in _OTHER_FORMULAS if (value := saved.get(key))}
    if saved.get("peft_type") != "LORA":
        changes["peft_type"] = saved.get("peft_type")
    if saved.get("bias", "none") != "none":
        changes["bias"] = saved["bias"]
    if str(saved.get("init_lora_weights", True)).lower() not in _SAME_BASE:
        changes["init_lora_weights"] = saved["init_lora_weights"]
    if changes:
        words = ", ".join(f"{key}={value}" for key, value in changes.items())
        raise SettingError(f"lora.path: {folder} has {words}; only W0 + alpha / r * B A of linear layers is supported")


def _check_base(folder: Path, base: AdapterBase) -> None:
    """Raise `SettingError` if the adapter was trained on another base. Files of other programs do not name their base."""
    with safe_open(folder / _WEIGHTS, framework="pt") as file:
        digest = (file.metadata() or {}).get(_BASE_DIGEST)
    if digest and base.digest and digest != base.digest:
        raise SettingError(
            f"model.path: {base.path} is not the base model of the adapter in {folder}: its weights differ"
        )


def _layers(names: Iterable[str]) -> str:
    """A short form of the layers that these matrices are of."""
    layers = {name.rpartition(".")[0] for name in names}
    return f"{len(layers)} layers ({', '.join(sorted({layer.rpartition('.')[2] for layer in layers}))})"


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The matrices that `write_adapter` wrote, by the same names."""
    tensors = load_file(folder / _WEIGHTS)
    return {name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor for name, tensor in tensors.items()}
