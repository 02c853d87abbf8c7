"""The export of a multimodal checkpoint's language model, with the parts that were not trained as they were.

The result has the configuration, the names and the other tensors and files of the checkpoint that training began with, so whatever serves
that one serves it.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..relay.checkpoints import share_by_umask
from .policy.checkpoint_files import CONFIG, WITHOUT_WEIGHTS, language_model, weight_files

_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head."
_FIRST = "model.embed_tokens.weight"
"""A tensor that every language model has; its name in a checkpoint begins as those of all others of it."""


def has_names_of_model(base: Path, names: Iterable[str]) -> bool:
    """Whether the language model of a checkpoint has all these tensors by the names of transformers' model: its experts are fused."""
    return {*names} <= {*language_model(_tensor_files(base)).values()}


def add_other_parts(folder: Path, base: Path) -> None:
    """Complete the export of a language model in `folder` to a checkpoint like `base`, whose language model was trained.

    Its tensors get the names of `base`. All other ones are copied bit for bit, those of vision and of the prediction of several tokens among them.
    Raises SettingError, before anything is written, if `base` has no weights.
    """
    places = _tensor_files(base)
    own = language_model(places)
    others = places.keys() - own.keys()
    by_file: dict[Path, list[str]] = {}
    for name in sorted(others):
        by_file.setdefault(places[name], []).append(name)
    trained = weight_files(folder)
    count = len(trained) + len(by_file)
    index: dict[str, str] = {}
    size = 0
    for number, source in enumerate([*trained, *by_file], 1):
        if number <= len(trained):
            tensors = {_name_in_base(name, own): tensor for name, tensor in load_file(source).items()}
            source.unlink()
        else:
            with safe_open(source, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in by_file[source]}
        target = folder / f"model-{number:05}-of-{count:05}.safetensors"
        save_file(tensors, target, {"format": "pt"})
        share_by_umask(target)
        index |= dict.fromkeys(tensors, target.name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    whole = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    (folder / _INDEX).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    _write_config(folder / CONFIG, base / CONFIG)
    for pattern in WITHOUT_WEIGHTS:
        for path in base.glob(pattern):
            if path.name != _INDEX and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def _tensor_files(base: Path) -> dict[str, Path]:
    """The file of each tensor."""
    found: dict[str, Path] = {}
    for path in weight_files(base):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _name_in_base(name: str, own: dict[str, str]) -> str:
    """The name in the base of a tensor of the export, by the names that the base's tensors have there (`language_model`)."""
    back = {exported: base for base, exported in own.items()}
    if name in back or name.startswith(_HEAD):
        return back.get(name, name)
    prefix = back[_FIRST].removesuffix(_FIRST.removeprefix("model."))
    return prefix + name.removeprefix("model.")


def _write_config(path: Path, base: Path) -> None:
    """Write the base's configuration, with the type of the exported weights."""
    dtype = json.loads(path.read_text(encoding="utf-8")).get("dtype", "float32")
    config: dict[str, Any] = json.loads(base.read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        part.pop("torch_dtype", None)  # the older name
        part["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
