"""Features that no entry of a family covers are refused by name."""

import ast
import dataclasses
from typing import Any

import pytest
import torch
from support.policies import FAMILIES, LLAMA_LINE, tiny_policy
from support.source_tree import SOURCES, TREES, name_of
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig

from headrace.comm.errors import SettingError
from headrace.trainer.policy.attention import NAME
from headrace.trainer.policy.families import COMMON_SETTINGS, window_of
from headrace.trainer.policy.families import FAMILIES as DECLARED
from headrace.trainer.policy.model import load_policy
from headrace.trainer.policy.supported import check_layers, check_router_loss, check_supported


@dataclasses.dataclass
class LaterConfig(LlamaConfig):
    """A family as a later version of transformers might have it."""

    model_type = "llama"
    attention_chunk_size: int = 0


def test_a_setting_of_a_later_transformers_is_refused_by_name_unless_it_has_its_default():
    config: Any = LaterConfig()
    check_supported(config)
    config.attention_chunk_size = 8
    with pytest.raises(SettingError, match="model.path: llama with attention_chunk_size=8, a setting of a later"):
        check_supported(config)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_every_setting_that_transformers_declares_for_a_family_is_known(family):
    base, own = (
        {field.name for field in dataclasses.fields(kind)}
        for kind in (PreTrainedConfig, type(AutoConfig.for_model(family)))
    )
    assert own - base <= COMMON_SETTINGS | {*DECLARED[family].settings.split()}


@pytest.mark.parametrize("family", LLAMA_LINE)
def test_a_parameter_that_the_decoders_do_not_read_is_refused_by_name(tmp_path, family):
    policy = load_policy(tiny_policy(tmp_path, family), weights=False)
    layers: Any = policy.model.base_model.layers
    names = [name for name, _ in layers[0].named_parameters()]
    check_layers(policy.config, names)
    with pytest.raises(SettingError, match=rf"model.path: {family} with layers that have mlp.norm.weight"):
        check_layers(policy.config, [*names, "mlp.norm.weight"])


@torch.no_grad()
def test_an_argument_of_attention_that_is_not_known_is_refused_by_name():
    module: Any = nn.Module()
    module.layer_idx = 0
    x = torch.zeros(1, 1, 3, 4)

    def attention(_layer: int, query: torch.Tensor, *_rest: Any) -> torch.Tensor:
        return query

    dispatch: Any = AttentionInterface()[NAME]
    dispatch(module, x, x, x, None, scaling=1.0, attention=attention, dropout=0.0, position_bias=None)
    with pytest.raises(SettingError, match="model.path: attention with position_bias is not supported"):
        dispatch(module, x, x, x, None, scaling=1.0, attention=attention, position_bias=x)


@pytest.mark.parametrize("family", LLAMA_LINE)
def test_the_windows_of_the_decoders_are_those_of_the_modules(tmp_path, family):
    changes = (
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1} if DECLARED[family].windows else {}
    )
    path = tiny_policy(tmp_path, family, **changes)
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation=NAME)
    seen: dict[int, Any] = {}

    def attention(layer: int, query: torch.Tensor, _key: Any, _value: Any, spec: Any) -> torch.Tensor:
        seen[layer] = spec.window
        return query

    model.model(input_ids=torch.tensor([[5, 6]]), use_cache=False, attention=attention)
    assert seen == {layer: window_of(model.config, layer) for layer in seen} and len(seen) == 2
    assert any(seen.values()) == bool(changes)


def test_a_loss_of_routers_needs_routers_with_a_softmax():
    check_router_loss(AutoConfig.for_model("qwen3_moe"))
    with pytest.raises(SettingError, match="algorithm.router_aux_coef: model type 'llama' has no experts; set it to 0"):
        check_router_loss(AutoConfig.for_model("llama"))


def test_no_other_file_knows_the_names_of_families():
    for path in SOURCES:
        if path.name not in ("families.py", "gguf_model.py"):  # the latter writes a checkpoint
            named = {node.value for node in ast.walk(TREES[path]) if isinstance(node, ast.Constant)} & {*DECLARED}
            assert not named, name_of(path)
