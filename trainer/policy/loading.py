"""Reads the weights of a checkpoint into a policy that may be sharded: each rank reads its own rows of each tensor.

Names and conversions are transformers': a tensor of the model is one of the checkpoint, or made of several (fused experts).
A tensor that is made of several is whole in memory while it is read; no other one is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...comm.errors import SettingError
from ...relay.weights.layout import held_rows, local_tensor
from .checkpoint_files import language_model, weight_files
from .lora import is_adapter

_PIECE = 1 << 22
"""Elements that are read, checked and cast at one time."""
_SHOWN = 4


@torch.no_grad()
def read_weights(model: PreTrainedModel, folder: Path, *, buffers_only: bool = False) -> None:
    """Fill the parameters and persistent buffers of a model but its adapter; of a sharded one, the rows that this rank holds.

    buffers_only: leave the parameters. Raises SettingError for weights that are missing, unknown, of another shape or not finite, and for damaged files.
    """
    with ExitStack() as files:
        tensors = _open(folder, files)
        reader = _WeightReader(model, folder)
        if buffers_only:
            reader.targets = persistent_buffers(model)
            kinds = {_kind(name) for name in reader.targets}
            tensors = {name: tensor for name, tensor in tensors.items() if _kind(name) in kinds}
        for name, tensor in _renamed(model, reader.targets, tensors, folder):
            reader.take(name, tensor)
        reader.check_complete()


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a checkpoint that no training changes, by name; most families have none."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


class _WeightReader:
    """The tensors of a model by name, and which of them are filled."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        tensors = model.state_dict(keep_vars=True)
        self.targets: dict[str, Tensor] = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        self._folder = folder
        self._filled: dict[int, str] = {}
        """Filled tensors by identity, since a tied tensor has several names."""

    def take(self, name: str, tensor: Any) -> None:
        """Fill one tensor of the model from one of the checkpoint (or its slice); a tied one that is filled must be equal."""
        target = self.targets[name]
        shape = list(tensor.get_shape()) if hasattr(tensor, "get_shape") else list(tensor.shape)
        if shape != list(target.shape):
            raise SettingError(
                f"model.path: {name} has the shape {shape} in {self._folder}, and {list(target.shape)} by its config.json"
            )
        first = self._filled.setdefault(id(target), name)
        for own, read in _pieces(target, tensor):
            if first != name:
                self._check_tied(own, read)
                continue
            if read.is_floating_point() and read.numel() and not all(bound.isfinite() for bound in read.aminmax()):
                raise SettingError(f"model.path: {name} in {self._folder} has values that are not finite")
            own.copy_(read)

    def check_complete(self) -> None:
        missing = [name for name, target in self.targets.items() if id(target) not in self._filled]
        _refuse(self._folder, "lacks weights of the model", missing)

    def _check_tied(self, own: Tensor, read: Tensor) -> None:
        if not torch.equal(own, read.to(own)):
            raise SettingError(
                f"model.path: the configuration at {self._folder} ties LM head and embedding (tie_word_embeddings), "
                "but its weights hold two different ones: set tie_word_embeddings to false there"
            )


def _pieces(target: Tensor, tensor: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the rows of `target` that this rank holds, each with the same rows of the checkpoint's tensor."""
    local = local_tensor(target)
    if not local.dim():
        yield local, tensor[...]
        return
    low, high = held_rows(target)
    step = max(1, _PIECE // max(1, local[:1].numel()))
    for start in range(low, high, step):
        end = min(start + step, high)
        yield local[start - low : end - low], tensor[start:end]


def _open(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Slices of the language model's tensors in the checkpoint, by name in natural order; nothing is read yet."""
    found: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise SettingError(f"model.path: {path} is not a complete safetensors file ({error})") from error
    found = {own: found[name] for name, own in language_model(found).items()}
    return dict(sorted(found.items(), key=lambda item: _natural_order(item[0])))


def _renamed(
    model: PreTrainedModel, targets: Mapping[str, Tensor], tensors: Mapping[str, Any], folder: Path
) -> Iterator[tuple[str, Any]]:
    """The model's name of each tensor of the checkpoint, and the tensor; several become one where transformers joins them."""
    transforms = get_model_conversion_mapping(model)
    prefix = model.base_model_prefix
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    joined: dict[str, WeightConverter] = {}
    unknown: list[str] = []
    for source, tensor in tensors.items():
        name, pattern = rename_source_key(source, renamings, converters, prefix, dict(targets))
        if name not in targets:
            name, pattern = rename_source_key(source, [], [], prefix, dict(targets))
        if name not in targets:
            unknown.append(source)
        elif pattern is None:
            yield name, tensor
        else:
            converter = joined.setdefault(name, deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, source, pattern, lambda tensor=tensor: tensor[:])  # pyright: ignore
    _refuse(folder, "has weights without a place in the model", _unexpected(model, unknown))
    for name, converter in joined.items():
        yield from _joined(model, name, converter, folder)


def _joined(
    model: PreTrainedModel, name: str, converter: WeightConverter, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    try:
        found: dict[str, Any] = converter.convert(name, model=model, config=model.config)
    except Exception as error:
        raise SettingError(f"model.path: {name} cannot be built from the weights in {folder} ({error})") from error
    for target, value in found.items():
        yield target, value[0] if isinstance(value, list) else value


def _unexpected(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The names that transformers reports as unexpected. (Old checkpoints contain tables of rotary embeddings, which are ignored.)"""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]


def _refuse(folder: Path, fault: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise SettingError(f"model.path: {folder} {fault}: {', '.join(names[:_SHOWN])}{more}")


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
