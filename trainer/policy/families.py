"""The model families: what is special about each, and which of them each part of the program takes.

A feature that the policy would compute wrongly is refused by name: before a run starts, from `config.json` alone, and again
when a checkpoint is loaded.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...comm.errors import SettingError

_POSITIONAL_ROPES = frozenset(("default", "linear", "llama3", "yarn", "dynamic"))
"""Rotary embeddings that depend on a token's position alone. `dynamic` begins to depend on the length of the sequence
beyond `max_position_embeddings`, and no sequence here is longer."""
_LONG_ROPES = frozenset(("longrope", "su"))
"""Two sets of frequencies, see `rope`; `su` is the older name."""


class Family(NamedTuple):
    """The facts about a model type that the program needs. The rest is in transformers' modules, which compute every family."""

    is_llama_line: bool = False
    """`decoder` and `exact.decoder` compute it too, so it has exact mode, tensor parallelism and CUDA graphs."""
    ropes: frozenset[str] = _POSITIONAL_ROPES
    """Kinds of rotary embeddings."""
    has_experts: bool = False
    """Routers choose `num_experts_per_tok` experts for each token."""
    is_recurrent: bool = False
    """Most layers are gated delta nets (`recurrent`): they have a state of fixed size in place of keys and values."""
    has_sinks: bool = False
    """Each head has a learned score that its softmax counts and that carries no value (`AttentionSpec.sinks`)."""
    is_tied: bool = False
    """The LM head is the embedding where `config.json` does not say."""
    num_norms: int = 2
    """Norms of the hidden size in each layer."""
    has_head_norms: bool = False
    """Norms of query and key."""
    is_fused: bool = False
    """One matrix for query, key and value, and one for gate and up."""
    has_biases: bool = False
    """Query, key and value have biases whatever `attention_bias` says."""
    score_cap: str = ""
    """The setting of `config.json` that soft-caps the scores of attention; none for most families."""
    logit_cap: str = ""
    """The same for the logits."""
    logit_divisor: str = ""
    """The setting that divides the logits."""


_GEMMA = Family(is_tied=True)
_GEMMA_2 = Family(is_tied=True, num_norms=4, score_cap="attn_logit_softcapping", logit_cap="final_logit_softcapping")
_QWEN_NEXT = Family(is_recurrent=True, has_head_norms=True)
"""Norms times 1 + weight, a gate for each value that attention reads, rotation of a quarter of each head."""
FAMILIES = {
    "llama": Family(is_llama_line=True),
    "qwen2": Family(is_llama_line=True, has_biases=True),
    "qwen3": Family(is_llama_line=True, has_head_norms=True),
    "mistral": Family(is_llama_line=True),  # a sliding window in every layer
    "phi3": Family(is_llama_line=True, is_fused=True, ropes=_POSITIONAL_ROPES | _LONG_ROPES),
    "smollm3": Family(),  # some layers without rotary embedding
    "granite": Family(logit_divisor="logits_scaling"),  # multipliers of embedding, residual and scores
    "gemma": _GEMMA,  # norms times 1 + weight, embeddings times sqrt(hidden size)
    "gemma2": _GEMMA_2,  # as Gemma; norms behind attention and MLP as well; windows in some layers
    "gemma3_text": _GEMMA_2._replace(has_head_norms=True),  # as Gemma 2; a rotary embedding for each kind of layer
    "olmo2": Family(
        has_head_norms=True
    ),  # norms behind attention and MLP instead of before; those of heads over all heads
    "olmo3": Family(
        has_head_norms=True
    ),  # as OLMo 2; windows in some layers; a rotary embedding for each kind of layer
    "mixtral": Family(has_experts=True),
    "qwen2_moe": Family(has_experts=True, has_biases=True),  # and one expert that every token passes
    "qwen3_moe": Family(has_experts=True, has_head_norms=True),
    "granitemoe": Family(has_experts=True, logit_divisor="logits_scaling"),  # as Granite
    "qwen3_next": _QWEN_NEXT._replace(has_experts=True),
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT._replace(has_experts=True),
    "gpt_oss": Family(has_experts=True, has_sinks=True),  # clamped SwiGLU with biases; windows in some layers
}
"""Families by transformers' model type. Each is tested against transformers."""

MULTIMODAL = frozenset(("gemma3", "qwen3_5", "qwen3_5_moe"))
"""Model types whose language model (`text_config`) is of a family above. The other parts are not loaded and not exported."""


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` holds of the language model: all of it, or the part of a multimodal checkpoint."""
    if config.get("model_type") not in MULTIMODAL:
        return config
    return {"quantization_config": config.get("quantization_config")} | config.get("text_config", {})


def text_config(config: Any) -> Any:
    """transformers' configuration of the language model: all of it, or the part of a multimodal checkpoint."""
    if config.model_type not in MULTIMODAL:
        return config
    text = config.get_text_config()
    text.quantization_config = getattr(config, "quantization_config", None)
    return text


def family_of(config: Any) -> Family:
    """The facts about the family of a configuration."""
    return FAMILIES[config.model_type]


def cap_of(config: Any, setting: str) -> float | None:
    """The value of a setting of `Family` that soft-caps; None where the family or this policy has none."""
    return getattr(config, setting) if setting else None


def is_llama_line(config: Any) -> bool:
    """Whether `decoder` and `exact.decoder` compute this policy."""
    is_declared = FAMILIES[config.model_type].is_llama_line
    return is_declared and getattr(config, "hidden_act", "silu") == "silu" and not getattr(config, "mlp_bias", False)


def check_supported(config: Any) -> None:
    """Raise SettingError for a configuration that the policy would not compute as transformers does.

    config: transformers' configuration, or a namespace of what `config.json` holds.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        known = ", ".join(sorted((*FAMILIES, *MULTIMODAL)))
        raise SettingError(f"model.path: model type '{model_type}' is not supported (supported: {known})")
    ropes = FAMILIES[model_type].ropes
    rope_type = _rope_type(config, ropes)
    wrong = {
        f"rope type '{rope_type}', which depends on the sequence's length": rope_type not in ropes,
        _quantization(config): getattr(config, "quantization_config", None) is not None,
        "bidirectional attention (use_bidirectional_attention)": getattr(config, "use_bidirectional_attention", False),
        "an encoder (is_encoder_decoder)": getattr(config, "is_encoder_decoder", False),
    } | {name: (getattr(config, name, None) or 0.0) > 0 for name in ("attention_dropout", "resid_pdrop", "embd_pdrop")}
    for feature, is_present in wrong.items():
        if is_present:
            raise SettingError(f"model.path: {model_type} with {feature} is not supported")


def is_exact_supported(config: Mapping[str, Any], device_type: str = "cpu") -> bool:
    """Whether a policy with these values in `config.json` has exact mode on this kind of device."""
    try:
        check_exact_supported(SimpleNamespace(**config), device_type)
    except SettingError:
        return False
    return True


def check_exact_supported(config: Any, device_type: str = "cpu") -> None:
    """Raise SettingError where exact mode cannot keep its promise."""
    if not is_llama_line(config):
        raise SettingError(f"generator.exact is not available for model type '{config.model_type}'")
    if device_type not in ("cpu", "cuda"):
        raise SettingError(f"generator.exact is not available on {device_type}, only on CPU and CUDA")
    if device_type == "cuda" and find_spec("triton") is None:
        raise SettingError("generator.exact: on CUDA it needs Triton, which is not installed")


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


def _rope_type(config: Any, known: frozenset[str]) -> str:
    """The first kind of rotary embedding in any layer that is not known, else `default`."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    types = [kind.get("rope_type") or kind.get("type") or "default" for kind in kinds]
    return next((t for t in types if t not in known), "default")


def _quantization(config: Any) -> str:
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method", "") if isinstance(settings, dict) else str(settings.quant_method)
    advice = " (load it with Mxfp4Config(dequantize=True) and name a copy saved from that)" if method == "mxfp4" else ""
    return f"quantized weights (quantization_config) {method}{advice}"
