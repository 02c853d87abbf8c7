"""Which policies each part of the program takes.

A feature that the policy would compute wrongly is refused by name: before a run starts, from `config.json` alone, and again
when a checkpoint is loaded.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from ...comm.errors import SettingError
from .families import COMMON_SETTINGS, FAMILIES, MULTIMODAL, Widths, family_of, is_llama_line

_LLAMA_LINE = re.compile(
    r"(input_layernorm|post_attention_layernorm|self_attn\.(qkv_proj|[qk]_norm)|mlp\.(gate|up|gate_up|down)_proj)\.weight"
    r"|self_attn\.[qkvo]_proj\.(weight|bias)"
)
"""The parameters of a layer that the decoders of the Llama line read."""


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
    act = getattr(config, "hidden_act", "silu")
    wrong[f"hidden_act={act} in recurrent layers"] = FAMILIES[model_type].is_recurrent and act != "silu"
    wrong |= {f"{name}={value}, a setting of a later transformers": True for name, value in _unknown_settings(config)}
    for feature, is_present in wrong.items():
        if is_present:
            raise SettingError(f"model.path: {model_type} with {feature} is not supported")


def check_layers(config: Any, parameters: Iterable[str]) -> None:
    """Raise SettingError if a layer of the Llama line has a parameter that `decoder` and `exact.decoder` do not read.

    parameters: their names in one layer.
    """
    for name in parameters if is_llama_line(config) else ():
        if not _LLAMA_LINE.fullmatch(name):
            raise SettingError(f"model.path: {config.model_type} with layers that have {name} is not supported")


def check_router_loss(config: Any) -> None:
    """Raise SettingError if a policy has no routers for `algorithm.router_aux_coef`."""
    experts = family_of(config).experts
    if experts is None:
        raise SettingError(f"algorithm.router_aux_coef: model type '{config.model_type}' has no experts; set it to 0")
    if not experts.has_softmax:
        raise SettingError(
            f"algorithm.router_aux_coef: the routers of model type '{config.model_type}' have no softmax, which the loss is about;"
            " set it to 0"
        )


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
    widths = Widths.of(config)
    sizes = {
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.kv_heads,
        "intermediate_size": widths.mlp,
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


def _unknown_settings(config: Any) -> list[tuple[str, Any]]:
    """Settings that transformers' configuration declares and no test here covers, with values other than their defaults."""
    declared: dict[str, Any] = {}
    for each in reversed(type(config).__mro__):
        fields = getattr(each, "__dataclass_fields__", {})
        # Those of transformers' base class are about the file, not about what a model computes.
        declared = {} if not getattr(each, "model_type", "") else declared | fields
    base = next((each for each in type(config).__mro__ if each.__name__ == "PreTrainedConfig"), object)
    known = COMMON_SETTINGS | {*family_of(config).settings.split(), *getattr(base, "__dataclass_fields__", {})}
    values = {name: getattr(config, name, field.default) for name, field in declared.items() if name not in known}
    return [(name, value) for name, value in values.items() if value != declared[name].default]


def _quantization(config: Any) -> str:
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method", "") if isinstance(settings, dict) else str(settings.quant_method)
    advice = " (load it with Mxfp4Config(dequantize=True) and name a copy saved from that)" if method == "mxfp4" else ""
    return f"quantized weights (quantization_config) {method}{advice}"
