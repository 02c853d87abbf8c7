"""The trained policy as files: in Hugging Face format, and its adapter in peft's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ..comm.disk import make_folders, raise_if_unwritable
from ..comm.recipe import LoraSettings
from ..relay.checkpoints import share_by_umask
from .policy.adapter_files import AdapterBase, write_adapter
from .policy.loading import persistent_buffers
from .policy.lora import is_adapter
from .policy.model import Policy


def export(
    folder: Path,
    policy: Policy,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    lora: LoraSettings,
    base: AdapterBase,
) -> None:
    """Write a checkpoint's policy into its folder: `hf` with the tokenizer, and `adapter` where there is one.

    weights: whole tensors by name, in host memory; those of an adapter are merged into the others too.
    Raises `OSError` where the disk has no room.
    """
    merged = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    adapter = {name: weight for name, weight in weights.items() if is_adapter(name)}
    make_folders(folder.parent.parent, folder.parent.name, folder.name, "hf")
    try:
        if adapter:
            write_adapter(folder / "adapter", adapter, lora, base)
        save_policy(policy, folder / "hf", tokenizer, merged)
    except SafetensorError:
        raise_if_unwritable(folder)
        raise


def save_policy(
    policy: Policy, folder: str | Path, tokenizer: Any = None, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write safetensors, configuration and tokenizer; `AutoModelForCausalLM.from_pretrained` loads this policy from them.

    `weights` are whole tensors by name, for a policy that holds only shards.
    """
    state = None if weights is None else dict(weights) | persistent_buffers(policy.model)
    policy.model.save_pretrained(folder, state_dict=state, safe_serialization=True)
    for path in Path(folder).glob("*.safetensors"):
        share_by_umask(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
