"""Which policies are supported, by the whole program, by exact mode and by tensor parallelism.

A feature that the policy would compute wrongly is refused by name when a checkpoint is loaded.
"""

from typing import Any

import torch

from ...comm.errors import SettingError

FAMILIES = frozenset(("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"))
"""Model types of transformers that are tested against transformers."""

_LLAMA_LINE = frozenset(("llama", "qwen2", "qwen3", "mistral", "phi3"))
_POSITIONAL_ROPES = frozenset(("default", "linear", "llama3", "yarn"))
"""Rotary embeddings that depend on a token's position alone, not on the length of its sequence."""


def is_llama_line(config: Any) -> bool:
    """Whether `decoder` and `exact_decoder` compute this policy."""
    return config.model_type in _LLAMA_LINE and config.hidden_act == "silu" and not getattr(config, "mlp_bias", False)


def check_supported(config: Any) -> None:
    """Raise SettingError for a configuration that the policy would not compute as transformers does."""
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise SettingError(f"model.path: model type '{config.model_type}' is not supported (supported: {known})")
    rope_type = _rope_type(config)
    wrong = {
        f"rope type '{rope_type}', which depends on the sequence's length": rope_type not in _POSITIONAL_ROPES,
        "attention_dropout": getattr(config, "attention_dropout", 0.0) > 0,
        "quantized weights (quantization_config)": getattr(config, "quantization_config", None) is not None,
        "bidirectional attention (use_bidirectional_attention)": getattr(config, "use_bidirectional_attention", False),
        "an encoder (is_encoder_decoder)": getattr(config, "is_encoder_decoder", False),
    }
    for feature, is_present in wrong.items():
        if is_present:
            raise SettingError(f"model.path: {config.model_type} with {feature} is not supported")


def check_exact_supported(config: Any, device: torch.device) -> None:
    """Raise SettingError where exact mode cannot keep its promise."""
    if not is_llama_line(config):
        raise SettingError(f"generator.exact is not available for model type '{config.model_type}'")
    if device.type != "cpu":
        raise SettingError(f"generator.exact is not available on {device.type}, only on the CPU")


def check_splittable(config: Any, size: int) -> None:
    """Raise SettingError if a policy of this configuration cannot be split over `size` ranks."""
    if size == 1:
        return
    if not is_llama_line(config):
        raise SettingError(f"rollout.tp: model type '{config.model_type}' runs on one rank only, not on {size}")
    heads = config.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, value in sizes.items():
        if value % size:
            raise SettingError(f"rollout.tp: {size} ranks do not divide the policy's {name} of {value}")


def _rope_type(config: Any) -> str:
    """The kind of rotary embedding; where layers differ, the first that is not positional, else `default`."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    types = [kind.get("rope_type", "default") for kind in kinds]
    return next((t for t in types if t not in _POSITIONAL_ROPES), types[0] if types else "default")
