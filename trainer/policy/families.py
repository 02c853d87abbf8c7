"""Which policies are supported, and what the Llama line has in common.

A feature that would be computed wrongly is refused by its name when a checkpoint is loaded.
"""

from typing import Any

import torch
from torch import Tensor

from ...comm.errors import SettingError

FAMILIES = frozenset(("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"))
"""Model types of transformers that are tested against transformers."""

_LLAMA_LINE = frozenset(("llama", "qwen2", "qwen3", "mistral", "phi3"))
_POSITIONAL_ROPES = frozenset(("default", "linear", "llama3", "yarn"))
"""Rotary embeddings that depend on a token's position alone, not on the length of its sequence."""


def check_supported(config: Any) -> None:
    """Raise SettingError for a configuration that the policy would not compute as transformers does."""
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise SettingError(f"model.path: model type '{config.model_type}' is not supported (supported: {known})")
    wrong = {
        f"rope type '{rope_type(config)}', which depends on the sequence's length": rope_type(config)
        not in _POSITIONAL_ROPES,
        "attention_dropout": getattr(config, "attention_dropout", 0.0) > 0,
        "quantized weights (quantization_config)": getattr(config, "quantization_config", None) is not None,
        "bidirectional attention (use_bidirectional_attention)": bool(
            getattr(config, "use_bidirectional_attention", False)
        ),
        "an encoder (is_encoder_decoder)": bool(getattr(config, "is_encoder_decoder", False)),
    }
    for feature, is_present in wrong.items():
        if is_present:
            raise SettingError(f"model.path: {config.model_type} with {feature} is not supported")


def is_llama_line(config: Any) -> bool:
    """Whether the forwards of our own (`decoder`, `exact`) compute this policy."""
    return config.model_type in _LLAMA_LINE and config.hidden_act == "silu" and not getattr(config, "mlp_bias", False)


def rope_type(config: Any) -> str:
    """The kind of rotary embedding; where layers differ, the first that is not positional, else `default`."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    types = [kind.get("rope_type", "default") for kind in kinds]
    return next((t for t in types if t not in _POSITIONAL_ROPES), types[0] if types else "default")


def rope_table(model: Any, context: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [context, 1, rotary dim] of all positions; `sin` has its first half negated."""
    cos, sin = model.rotary_emb(torch.empty(1, dtype=dtype, device=device), torch.arange(context, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0].unsqueeze(1), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1)


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer of the Llama line, as transformers' modules choose it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and config.model_type in ("qwen2", "qwen3"):
        return window if kinds[layer] == "sliding_attention" else None
    return window if config.model_type in ("mistral", "phi3") else None
