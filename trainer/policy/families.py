"""The model families: all facts that the program needs about them.

A new family of the Llama line is an entry of `FAMILIES` and a test configuration. `supported.py` refuses what no entry covers.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ...comm.errors import SettingError

_POSITIONAL_ROPES = frozenset(("default", "linear", "llama3", "yarn", "dynamic"))
"""Rotary embeddings that depend on a token's position alone. `dynamic` begins to depend on the length of the sequence
beyond `max_position_embeddings`, and no sequence here is longer."""
_LONG_ROPES = frozenset(("longrope", "su"))
"""Two sets of frequencies, see `rope`; `su` is the older name."""


_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Settings for the number of experts; versions of transformers write different ones for a family."""


class Experts(NamedTuple):
    """The settings of `config.json` that say how wide the experts are, and the kind of their routers."""

    width: str = "moe_intermediate_size"
    shared_width: str = ""
    """Of an expert that every token passes."""
    num_shared: str = ""
    """The number of those, each as wide as the others."""
    has_softmax: bool = True
    """Whether the router's probabilities are a softmax of its logits, as the load-balancing loss needs."""


class Family(NamedTuple):
    """The facts about a model type that the program needs. The rest is in transformers' modules, which compute every family."""

    settings: str = ""
    """The settings of transformers' configuration beyond `COMMON_SETTINGS` with which this policy is tested, separated by spaces. One that a later
    version of transformers adds is refused by its name unless it has its default."""
    is_llama_line: bool = False
    """`decoder` and `exact.decoder` compute it too, so it has exact mode, tensor parallelism and CUDA graphs."""
    multimodal: str = ""
    """The model type of checkpoints whose language model (`text_config`) is of this family. The other parts are not loaded; an export has them as they were."""
    text_settings: str = ""
    """Where transformers has no class for that language model alone: the settings by which this family computes text as it does, as
    `name=true` and `name=false` separated by spaces. Its rotary embedding has an axis each for time, height and width, which are
    equal for text."""
    ropes: frozenset[str] = _POSITIONAL_ROPES
    """Kinds of rotary embeddings."""
    windows: Literal["", "all", "by_layer"] = ""
    """The layers of a Llama-line policy that `sliding_window` holds for; `layer_types` names them `by_layer`."""
    is_recurrent: bool = False
    """Layers of the kind `linear_attention` are gated delta nets (`recurrent`): they have a state of fixed size in place of keys and values."""
    experts: Experts | None = None
    """Routers choose `num_experts_per_tok` experts for each token."""
    has_sinks: bool = False
    """Each head has a learned score that its softmax counts and that carries no value (`AttentionSpec.sinks`)."""
    is_tied: bool = False
    """The LM head is the embedding where `config.json` does not say."""
    num_norms: int = 2
    """Norms of the hidden size in each layer."""
    has_head_norms: bool = False
    """Norms of query and key."""
    fused: frozenset[str] = frozenset()
    """One matrix for query, key and value (`qkv`), one for gate and up (`gate_up`), two for the inputs of a recurrent layer (`delta`)."""
    has_buffers: bool = False
    """Beside its parameters a checkpoint has tensors that no training changes. They are not in a version, so every host reads them."""
    has_biases: bool = False
    """Query, key and value have biases whatever `attention_bias` says."""
    score_cap: str = ""
    """The setting of `config.json` that soft-caps the scores of attention; none for most families."""
    logit_cap: str = ""
    """The same for the logits."""
    logit_divisor: str = ""
    """The setting that divides the logits."""


COMMON_SETTINGS = frozenset(
    (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_bias",
        "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
    )
)  # fmt: skip
"""Settings that mean the same in every family, and those that do not change what is computed here."""
_WINDOWS = " use_sliding_window sliding_window max_window_layers layer_types"
_MULTIPLIERS = " mlp_bias attention_multiplier embedding_multiplier residual_multiplier logits_scaling"
_ROUTERS = " num_experts_per_tok output_router_logits router_aux_loss_coef"
_QWEN_EXPERTS = _ROUTERS + " num_experts moe_intermediate_size norm_topk_prob mlp_only_layers decoder_sparse_step"
_DELTA_NET = " layer_types linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads"
_SHARED_EXPERT = Experts(shared_width="shared_expert_intermediate_size")
_GEMMA = Family("use_bidirectional_attention hidden_activation", is_tied=True)
_GEMMA_2 = _GEMMA._replace(
    settings=_GEMMA.settings
    + " query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window layer_types",
    num_norms=4,
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)
FAMILIES = {
    "llama": Family("mlp_bias pretraining_tp", is_llama_line=True),
    "qwen2": Family(_WINDOWS, is_llama_line=True, has_biases=True, windows="by_layer"),
    "qwen3": Family(_WINDOWS, is_llama_line=True, has_head_norms=True, windows="by_layer"),
    "mistral": Family("sliding_window", is_llama_line=True, windows="all"),
    "phi3": Family(
        "sliding_window original_max_position_embeddings resid_pdrop embd_pdrop",
        is_llama_line=True,
        windows="all",
        fused=frozenset(("qkv", "gate_up")),
        ropes=_POSITIONAL_ROPES | _LONG_ROPES,
    ),
    # some layers without rotary embedding
    "smollm3": Family(_WINDOWS + " mlp_bias no_rope_layers no_rope_layer_interval"),
    # multipliers of embedding, residual and scores
    "granite": Family(_MULTIPLIERS, logit_divisor="logits_scaling"),
    "gemma": _GEMMA,  # norms times 1 + weight, embeddings times sqrt(hidden size)
    "gemma2": _GEMMA_2,  # as Gemma; norms behind attention and MLP as well; windows in some layers
    # as Gemma 2; a rotary embedding for each kind of layer
    "gemma3_text": _GEMMA_2._replace(has_head_norms=True, multimodal="gemma3"),
    # norms behind attention and MLP instead of before; those of heads over all heads
    "olmo2": Family(has_head_norms=True),
    # as OLMo 2; windows in some layers; a rotary embedding for each kind of layer
    "olmo3": Family("sliding_window layer_types", has_head_norms=True),
    "mixtral": Family(
        _ROUTERS + " num_local_experts router_jitter_noise sliding_window",
        experts=Experts("intermediate_size"),
    ),
    # and one expert that every token passes
    "qwen2_moe": Family(
        _QWEN_EXPERTS + _WINDOWS + " qkv_bias shared_expert_intermediate_size",
        experts=_SHARED_EXPERT,
        has_biases=True,
    ),
    "qwen3_moe": Family(_QWEN_EXPERTS + _WINDOWS, experts=Experts(), has_head_norms=True),
    # as Granite
    "granitemoe": Family(
        _MULTIPLIERS + _ROUTERS + " num_local_experts",
        experts=Experts("intermediate_size"),
        logit_divisor="logits_scaling",
    ),
    # clamped SwiGLU with biases; windows in some layers
    "gpt_oss": Family(
        _ROUTERS + " num_local_experts sliding_window layer_types swiglu_alpha swiglu_limit",
        experts=Experts("intermediate_size"),
        has_sinks=True,
    ),
    # norms behind attention and MLP as well; the rotation takes neighbours of half of each head
    "glm4": Family(multimodal="glm4v", text_settings="attention_bias=true", num_norms=4, fused=frozenset(("gate_up",))),
    # sigmoid routers with groups of experts and a bias that chooses but does not weigh; the first layers without experts
    "glm4_moe": Family(
        _ROUTERS.replace(" router_aux_loss_coef", "")
        + " first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_mtp_layers"
        " routed_scaling_factor topk_group use_qk_norm",
        multimodal="glm4v_moe",
        text_settings="use_qk_norm=false",
        experts=Experts(num_shared="n_shared_experts", has_softmax=False),
        has_buffers=True,
        has_head_norms=True,
    ),
    # a gate for each value that attention reads, rotation of a quarter of each head, norms times 1 + weight
    "qwen3_next": Family(
        _QWEN_EXPERTS + _DELTA_NET + " shared_expert_intermediate_size",
        fused=frozenset(("delta",)),
        is_recurrent=True,
        experts=_SHARED_EXPERT,
        has_head_norms=True,
    ),
    "qwen3_5_text": Family(_DELTA_NET, multimodal="qwen3_5", is_recurrent=True, has_head_norms=True),
    "qwen3_5_moe_text": Family(
        _ROUTERS + _DELTA_NET + " num_experts moe_intermediate_size shared_expert_intermediate_size",
        multimodal="qwen3_5_moe",
        is_recurrent=True,
        experts=_SHARED_EXPERT,
        has_head_norms=True,
    ),
}
"""Families by transformers' model type, and all that the program knows of each. Each is tested against transformers."""

MULTIMODAL = frozenset(family.multimodal for family in FAMILIES.values() if family.multimodal)
"""Model types whose language model (`text_config`) is of a family above."""


class DeltaWidths(NamedTuple):
    """The sizes of the recurrent layers of a policy."""

    num_layers: int
    heads: int
    """Each has a state [key, value]."""
    key: int
    value: int
    keys: int
    """The width of all keys, of which several heads share one."""
    window: int
    """Inputs of the convolution that a state has."""

    @property
    def channels(self) -> int:
        """The width of query, key and value together."""
        return 2 * self.keys + self.heads * self.value

    @classmethod
    def of(cls, values: Any, layers: int) -> "DeltaWidths":
        """Of a configuration as a mapping, of a policy with so many layers."""
        interval = values.get("full_attention_interval") or 4
        kinds = values.get("layer_types") or [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        ]
        heads = int(values["linear_num_value_heads"])
        key = int(values["linear_key_head_dim"])
        return cls(
            num_layers=sum(kind == "linear_attention" for kind in kinds),
            heads=heads,
            key=key,
            value=int(values["linear_value_head_dim"]),
            keys=int(values["linear_num_key_heads"]) * key,
            window=int(values["linear_conv_kernel_dim"]) - 1,
        )


class Widths(NamedTuple):
    """The sizes of a policy, read from its configuration."""

    num_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Of an MLP without experts; 0 where every layer has experts and the configuration gives none."""
    experts: int
    """In each layer; 0 without."""
    expert: int
    """The width of one."""
    passed: int
    """Experts that a router chooses for each token."""
    shared: int
    """The width of the experts that every token passes."""
    num_dense: int
    """Layers without experts in a policy with them."""
    delta: DeltaWidths | None
    """Of the recurrent layers, if there are any."""

    @classmethod
    def of(cls, config: Any) -> "Widths":
        """Of transformers' configuration, or of what `config.json` holds; raises SettingError if a size is missing."""
        values = config if isinstance(config, Mapping) else _Attributes(config)
        try:
            family = FAMILIES.get(values["model_type"], Family())
            layers = int(values["num_hidden_layers"])
            hidden = int(values["hidden_size"])
            heads = int(values["num_attention_heads"])
            vocab = int(values["vocab_size"])
            names = family.experts
            number = next((name for name in _NUM_EXPERTS if values.get(name)), _NUM_EXPERTS[0])
            experts = int(values[number]) if names else 0
            expert = int(values[names.width]) if names else 0
            passed = int(values["num_experts_per_tok"]) if names else 0
            delta = DeltaWidths.of(values, layers) if family.is_recurrent else None
            mlp = int(values["intermediate_size"]) if names is None else int(values.get("intermediate_size") or 0)
        except KeyError as error:
            raise SettingError(f"model.path: config.json has no {error.args[0]}") from None
        shared = 0
        if names is not None and names.shared_width:
            shared = int(values.get(names.shared_width) or 0)
        elif names is not None and names.num_shared:
            shared = expert * int(values.get(names.num_shared) or 0)
        return cls(
            num_layers=layers,
            hidden=hidden,
            vocab=vocab,
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            mlp=mlp,
            experts=experts,
            expert=expert,
            passed=passed,
            shared=shared,
            num_dense=_num_dense(values, layers) if names else 0,
            delta=delta,
        )


class _Attributes:
    """A configuration's attributes by the methods of a mapping."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._config, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str) -> Any:
        return getattr(self._config, name, None)


def _num_dense(values: Any, layers: int) -> int:
    """Layers without experts of a policy that has them in others."""
    first = values.get("first_k_dense_replace") or 0
    only = values.get("mlp_only_layers") or ()
    step = values.get("decoder_sparse_step") or 1
    return sum(layer < first or layer in only or (layer + 1) % step > 0 for layer in range(layers))


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer of the Llama line, as transformers' modules choose it."""
    windows = family_of(config).windows
    window = getattr(config, "sliding_window", None)
    if windows == "by_layer":
        return window if config.layer_types[layer] == "sliding_attention" else None
    return window if windows == "all" else None


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` holds of the language model: all of it, or the part of a multimodal checkpoint."""
    if config.get("model_type") not in MULTIMODAL:
        return config
    text = _of_family(config["model_type"], config.get("text_config", {}))
    return {"quantization_config": config.get("quantization_config")} | text


def text_config(config: Any) -> Any:
    """transformers' configuration of the language model: all of it, or the part of a multimodal checkpoint."""
    if config.model_type not in MULTIMODAL:
        return config
    text = config.get_text_config()
    values = _of_family(config.model_type, text.to_dict())
    if values["model_type"] != text.model_type:
        from transformers import AutoConfig

        values["tie_word_embeddings"] = config.tie_word_embeddings
        text = AutoConfig.for_model(**values)
    text.quantization_config = getattr(config, "quantization_config", None)
    return text


def _of_family(multimodal: str, text: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model of a multimodal checkpoint, as one of the family that computes it."""
    name, family = next((name, family) for name, family in FAMILIES.items() if family.multimodal == multimodal)
    if not family.text_settings:
        return text
    fixed = {key: value == "true" for key, _, value in (each.partition("=") for each in family.text_settings.split())}
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = {"partial_rotary_factor": 1.0} | {key: value for key, value in rope.items() if key != "mrope_section"}
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    kept = {key: value for key, value in text.items() if key not in ("rope_scaling", "transformers_version")}
    return kept | fixed | {"model_type": name, "rope_parameters": rope, "head_dim": head_dim}


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
