"""The policies of the benchmarks: random weights, or one that the user names."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from headrace.launch.recipes.tiny_policy import character_tokenizer

_DIMENSIONS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
_SIZES = {
    "4m": (256, 5, 4, 2, 768, 32),
    "5m": (256, 5, 4, 2, 768, 4096),
    "100m": (768, 12, 12, 4, 2048, 32000),
    "0.5b": (896, 24, 14, 2, 4864, 151936),
    "1.5b": (1536, 28, 12, 2, 8960, 151936),
}


def build(size: str, folder: Path) -> Path:
    """Save a policy of random weights; returns its path."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(zip(_DIMENSIONS, _SIZES[size], strict=True))
    config = Qwen2Config(
        **sizes, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / size)
    return folder / size


def policy_folder(folder: Path, given: str | None) -> None:
    """Make FOLDER/policy: a link to the given policy, else one of 5M random parameters with heads of 64."""
    if given is not None:
        (folder / "policy").symlink_to(Path(given).resolve())
        return
    build("5m", folder).rename(folder / "policy")
    character_tokenizer(" abcdefghijklmnopqrstuvwxyz").save_pretrained(folder / "policy")
