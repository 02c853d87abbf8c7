"""The trained policy as files: in Hugging Face format, and its adapter in peft's."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ..comm.disk import make_folders, raise_if_unwritable
from ..comm.errors import SettingError
from ..comm.recipe import LoraSettings
from ..relay.checkpoints import share_by_umask
from .multimodal import add_other_parts, has_names_of_model
from .policy.adapter_files import AdapterBase, write_adapter
from .policy.checkpoint_files import find_checkpoint
from .policy.loading import persistent_buffers
from .policy.lora import is_adapter
from .policy.model import Policy

_log = logging.getLogger(__name__)


def export(
    folder: Path,
    policy: Policy,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    lora: LoraSettings,
    base: AdapterBase,
) -> None:
    """Write a checkpoint's policy into its folder: `hf` with the tokenizer, and `adapter` where there is one.

    weights: whole tensors by name, in host memory; those of an adapter are merged into the others too. base: the checkpoint with which
    training began, whose other parts, such as vision, are in `hf` as they were.
    Raises `OSError` where the disk has no room.
    """
    merged = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    adapter = {name: weight for name, weight in weights.items() if is_adapter(name)}
    make_folders(folder.parent.parent, folder.parent.name, folder.name, "hf")
    try:
        if adapter:
            write_adapter(folder / "adapter", adapter, lora, base)
        _save_whole(policy, folder / "hf", tokenizer, merged, base)
    except SafetensorError:
        raise_if_unwritable(folder)
        raise


def _save_whole(policy: Policy, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor], base: AdapterBase) -> None:
    """Write a policy with the other parts of its checkpoint."""
    if not policy.is_part:
        save_policy(policy, folder, tokenizer, weights)
        return
    try:
        base_folder = find_checkpoint(base.path)
        is_split = not has_names_of_model(base_folder, weights)
    except SettingError as error:  # the weights are gone that training began with
        _log.warning("the export at %s is the language model alone: %s", folder, error)
        save_policy(policy, folder, tokenizer, weights)
        return
    save_policy(policy, folder, tokenizer, weights, is_split=is_split)
    add_other_parts(folder, base_folder)


def save_policy(
    policy: Policy,
    folder: str | Path,
    tokenizer: Any = None,
    weights: Mapping[str, Tensor] | None = None,
    *,
    is_split: bool = True,
) -> None:
    """Write safetensors, configuration and tokenizer; `AutoModelForCausalLM.from_pretrained` loads this policy from them.

    `weights` are whole tensors by name, for a policy that holds only shards. is_split: fused experts are written one by one, where
    transformers does that for the family.
    """
    state = None if weights is None else dict(weights) | persistent_buffers(policy.model)
    policy.model.save_pretrained(folder, state_dict=state, safe_serialization=True, save_original_format=is_split)
    for path in Path(folder).glob("*.safetensors"):
        share_by_umask(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
