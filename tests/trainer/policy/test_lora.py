"""The adapter of `lora`: its formula and gradients in float64, its targets, and its files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from support.policies import random_prompts, tiny_policy
from torch import nn
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.comm.recipe import LoraSettings
from headrace.comm.tensor_split import TensorSplit
from headrace.trainer.policy.adapter_files import check_adapter, merge_adapter, read_adapter, write_adapter
from headrace.trainer.policy.lora import (
    LoraLinear,
    adapter_weights,
    add_adapter,
    merged,
    target_layers,
    without_adapter,
)
from headrace.trainer.policy.model import Policy, load_policy, save_policy
from headrace.trainer.policy.tensor_parallel import TensorParallel

LORA = LoraSettings(rank=4, alpha=8)


def adapted(path: Path, settings: LoraSettings = LORA, seed: int = 0, **options: Any) -> Policy:
    """A policy with a random adapter, B included."""
    policy = load_policy(path, shard=lambda p: add_adapter(p.model, settings, seed, torch.float32), **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in adapter_weights(policy.model).items():
            if name.endswith("lora_B"):
                weight.normal_(0, 0.1)
    return policy


def hidden_of(policy: Policy) -> torch.Tensor:
    tokens = torch.tensor(random_prompts(1, 40)[0])
    return policy.forward_packed(tokens, torch.tensor([0, len(tokens)]))


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_the_formula_in_float64(has_bias: bool):
    torch.manual_seed(0)
    a, b, x, grad = (torch.randn(shape) for shape in ((4, 24), (16, 4), (2, 9, 24), (2, 9, 16)))
    layer = LoraLinear(nn.Linear(24, 16, bias=has_bias).requires_grad_(False), a, b, scaling=0.5)
    x.requires_grad_(True)
    result = layer(x)
    result.backward(grad)
    wide = [t.detach().double().requires_grad_(True) for t in (x, a, b)]
    product = F.linear(wide[0], layer.weight.double()) + 0.5 * (wide[0] @ wide[1].t()) @ wide[2].t()
    expected = product if layer.bias is None else product + layer.bias.double()
    expected.backward(grad.double())
    assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5)
    for ours, exact in zip((x, layer.lora_A, layer.lora_B), wide, strict=True):
        assert ours.grad is not None and exact.grad is not None
        assert torch.allclose(ours.grad.double(), exact.grad, rtol=0, atol=2e-5)


def test_below_autocast_a_layer_multiplies_with_the_weight_that_a_rollout_keeps_in_bfloat16():
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(24, 16).bfloat16(), torch.randn(4, 24), torch.randn(16, 4), scaling=0.01)
    x = torch.randn(5, 24)
    weight = merged(layer.weight, layer.lora_A, layer.lora_B, 0.01)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(result, F.linear(x.bfloat16(), weight, layer.bias))


def test_a_new_adapter_has_no_effect_and_pefts_distribution_and_the_same_values_for_the_same_seed(tmp_path: Path):
    path = tiny_policy(tmp_path)

    def fresh(seed: int) -> Policy:
        return load_policy(path, shard=lambda p: add_adapter(p.model, LORA, seed, torch.float32))

    policy, again, other = fresh(3), fresh(3), fresh(4)
    assert torch.equal(hidden_of(policy), hidden_of(load_policy(path)))
    weights = adapter_weights(policy.model)
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == list(weights)
    for name, weight in weights.items():
        assert torch.equal(weight, adapter_weights(again.model)[name])
        if name.endswith("lora_B"):
            assert not weight.any()
            continue
        bound = 1 / math.sqrt(weight.shape[1])
        assert not torch.equal(weight, adapter_weights(other.model)[name])
        assert weight.abs().max() <= bound and abs(weight.std().item() / (bound / math.sqrt(3)) - 1) < 0.15


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen2_moe", "gpt_oss"])
def test_a_merged_policy_is_loaded_by_transformers_with_equal_logits(tmp_path: Path, family: str):
    policy = adapted(tiny_policy(tmp_path, family))
    weights = {name: weight.detach().clone() for name, weight in policy.weights().items()}
    adapter = merge_adapter(weights, LORA.alpha / LORA.rank)
    assert adapter.keys() == adapter_weights(policy.model).keys()
    save_policy(policy, tmp_path / "hf", weights=weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    tokens = torch.tensor([random_prompts(1, 24)[0]])
    with torch.no_grad():
        ours = policy.logits(policy.forward_packed(tokens[0], torch.tensor([0, tokens.shape[1]])))
        base = load_policy(tmp_path / family)
        before = base.logits(base.forward_packed(tokens[0], torch.tensor([0, tokens.shape[1]])))
        assert torch.allclose(model(tokens).logits[0], ours, rtol=0, atol=1e-5)
    assert (ours - before).abs().max() > 1e-3


def test_without_its_adapter_a_policy_is_the_base(tmp_path: Path):
    path = tiny_policy(tmp_path)
    policy = adapted(path)
    before = hidden_of(policy)
    with without_adapter(policy.model):
        assert torch.equal(hidden_of(policy), hidden_of(load_policy(path)))
    assert torch.equal(hidden_of(policy), before) and not torch.equal(before, hidden_of(load_policy(path)))


def test_targets_are_named_as_by_peft_and_experts_are_refused(tmp_path: Path):
    moe = load_policy(tiny_policy(tmp_path, "mixtral")).model
    assert {name.rpartition(".")[2] for name in target_layers(moe, "all-linear")} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    assert len(target_layers(moe, ("q_proj", "1.self_attn.v_proj"))) == 3
    for wrong in ("gate_up_proj", "lm_head", "proj"):
        with pytest.raises(SettingError, match=rf"lora\.targets: no linear layer is named '{wrong}'.*q_proj.*experts"):
            target_layers(moe, ("q_proj", wrong))


@pytest.mark.parametrize("split", [TensorSplit(0), TensorSplit(0, (4, 2, 2)), TensorSplit(1)], ids=str)
def test_factors_of_a_ranks_slice_multiply_to_the_slice_of_the_product(split: TensorSplit):
    torch.manual_seed(0)
    b, a, ranks = torch.randn(8, 3), torch.randn(3, 6), TensorParallel()
    ranks.size = 2
    for ranks.rank in range(2):
        part, other = ranks.slice_factors(b, a, split)
        assert torch.allclose(part @ other, ranks.slice(b @ a, split), rtol=0, atol=1e-6)


def test_an_adapter_is_written_as_peft_reads_it(tmp_path: Path):
    policy = adapted(tiny_policy(tmp_path))
    weights = {name: weight.detach() for name, weight in adapter_weights(policy.model).items()}
    write_adapter(tmp_path / "adapter", weights, LORA, "some/base")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["target_modules"] == sorted({name.split(".")[-2] for name in weights})
    read = read_adapter(tmp_path / "adapter")
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_checkpoints_adapter_of_other_settings_is_refused(tmp_path: Path):
    weights = {name: weight.detach() for name, weight in adapter_weights(adapted(tiny_policy(tmp_path)).model).items()}
    write_adapter(tmp_path / "adapter", weights, LORA, "some/base")
    check_adapter(tmp_path / "adapter", weights, LORA)
    for name, value in (("rank", 5), ("alpha", 64.0), ("targets", ("q_proj",))):
        with pytest.raises(SettingError, match=f"lora.{name}"):
            check_adapter(tmp_path / "adapter", weights, structs.replace(LORA, **{name: value}))


@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.extra
def test_peft_loads_an_adapter_with_equal_logits(tmp_path: Path):
    peft: Any = pytest.importorskip("peft")
    for settings in (LORA, LoraSettings(rank=2, alpha=3, targets=("q_proj", "down_proj"))):
        policy = adapted(tiny_policy(tmp_path), settings)
        write_adapter(tmp_path / "adapter", adapter_weights(policy.model), settings, "some/base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="eager")
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        tokens = torch.tensor([random_prompts(1, 24)[0]])
        with torch.no_grad():
            ours = policy.logits(policy.forward_packed(tokens[0], torch.tensor([0, tokens.shape[1]])))
            assert torch.allclose(model(tokens).logits[0], ours, rtol=0, atol=1e-5)
