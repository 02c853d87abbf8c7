"""The export of a policy with an adapter: merged weights, and the adapter in the format of `peft`.

That is `adapter_config.json` and `adapter_model.safetensors`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from ...comm.errors import SettingError
from ...comm.recipe import LoraSettings
from .lora import ALL_LINEAR, A, B, is_adapter, merged

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
"""Around the name of a matrix, which is `<layer>.lora_A` or `<layer>.lora_B`."""


def merge_adapter(weights: dict[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Take the adapter out of the weights of a model, which become the merged ones, in fp32; returns the adapter."""
    adapter = {name: weights.pop(name) for name in list(weights) if is_adapter(name)}
    for name in {name.rpartition(".")[0] for name in adapter}:
        weight, a, b = weights[f"{name}.weight"], adapter[f"{name}.{A}"], adapter[f"{name}.{B}"]
        weights[f"{name}.weight"] = merged(weight.float(), a, b, scaling)
    return adapter


def write_adapter(folder: Path, weights: Mapping[str, Tensor], settings: LoraSettings, base: str) -> None:
    """Write the matrices of an adapter, by `lora.adapter_weights`'s names; `base` is the checkpoint below it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **_identity(weights, settings),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {f"{_PREFIX}{name}{_SUFFIX}": weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _identity(names: Iterable[str], settings: LoraSettings) -> dict[str, object]:
    """Rank, alpha and targets of an adapter, in peft's terms."""
    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in names}
    chosen = (settings.targets,) if isinstance(settings.targets, str) else settings.targets
    targets = sorted(layers if settings.targets == ALL_LINEAR else chosen)
    return {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": targets}


def check_adapter(folder: Path, names: Iterable[str], settings: LoraSettings) -> None:
    """Raise `SettingError` if the adapter in `folder` is of other settings: its matrices would make other weights."""
    if not (folder / _CONFIG).exists():
        return  # the checkpoint is of a run without an adapter, and does not load
    saved = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    settings_of = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    for key, value in _identity(names, settings).items():
        if saved[key] != value:
            raise SettingError(f"lora.{settings_of[key]}: the checkpoint {folder.parent} has {saved[key]}, not {value}")


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The matrices that `write_adapter` wrote, by the same names."""
    tensors = load_file(folder / _WEIGHTS)
    return {name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor for name, tensor in tensors.items()}
