"""The adapter of `lora`: its formula and gradients in float64, its targets, and its files."""

import json
import math
import shutil
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
from headrace.comm.recipe import LoraSettings, Recipe, RunSettings
from headrace.comm.tensor_split import TensorSplit
from headrace.trainer.export import save_policy
from headrace.trainer.policy.adapter_files import (
    AdapterBase,
    check_adapter,
    keep_start,
    merged_weight,
    read_adapter,
    start_adapter,
    start_folder,
    write_adapter,
)
from headrace.trainer.policy.checkpoint_files import weights_digest
from headrace.trainer.policy.lora import (
    LoraLinear,
    adapter_shapes,
    adapter_weights,
    add_adapter,
    is_adapter,
    merged,
    target_layers,
    without_adapter,
)
from headrace.trainer.policy.model import Policy, load_policy
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


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen2_moe", "gpt_oss", "qwen3_next", "qwen3_5_text"])
def test_a_merged_policy_is_loaded_by_transformers_with_equal_logits(tmp_path: Path, family: str):
    policy = adapted(tiny_policy(tmp_path, family))
    adapter, weights = adapter_weights(policy.model), policy.weights()
    weights = {
        name: merged_weight(name, weight, adapter, LORA.alpha / LORA.rank).detach()
        for name, weight in weights.items()
        if not is_adapter(name)
    }
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


def written(folder: Path, settings: LoraSettings = LORA, family: str = "llama") -> tuple[Policy, Path]:
    """A policy with a random adapter, and the folder of that."""
    base = tiny_policy(folder, family)
    policy = adapted(base, settings)
    weights = {name: weight.detach() for name, weight in adapter_weights(policy.model).items()}
    write_adapter(folder / "adapter", weights, settings, AdapterBase.read(str(base)))
    return policy, folder / "adapter"


def started(path: Path, base: Path, settings: LoraSettings = LORA) -> dict[str, torch.Tensor]:
    """The matrices that a run with these settings begins with."""
    shapes = adapter_shapes(target_layers(load_policy(base, weights=False).model, settings.targets), settings.rank)
    return start_adapter(shapes, settings, path, AdapterBase.read(str(base)))


def test_an_adapter_is_written_as_peft_reads_it(tmp_path: Path):
    policy, folder = written(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    weights = adapter_weights(policy.model)
    assert config["target_modules"] == sorted({name.split(".")[-2] for name in weights})
    read = read_adapter(folder)
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_policy_begins_with_the_adapter_of_a_folder(tmp_path: Path):
    policy, folder = written(tmp_path)
    start = started(folder, tmp_path / "llama")
    again = load_policy(tmp_path / "llama", shard=lambda p: add_adapter(p.model, LORA, 7, torch.float32, start))
    assert torch.equal(hidden_of(again), hidden_of(policy))
    assert all(weight.requires_grad for weight in adapter_weights(again.model).values())


def test_a_run_that_has_begun_keeps_a_copy_of_its_first_adapter(tmp_path: Path):
    policy, folder = written(tmp_path)
    run, weights = tmp_path / "run", adapter_weights(policy.model)
    run.mkdir()
    recipe = Recipe(run=RunSettings(dir=str(run)), lora=structs.replace(LORA, path=str(folder)))
    (run / "start_adapter").mkdir()
    (run / "start_adapter" / "adapter_config.json").write_text("of a start that failed")
    assert start_folder(recipe.run.dir, recipe.lora) == folder
    keep_start(recipe.run.dir, recipe.lora)
    (run / "journal.jsonl").touch()
    shutil.rmtree(folder)
    copy = started(start_folder(recipe.run.dir, recipe.lora), tmp_path / "llama")
    assert copy.keys() == weights.keys() and all(torch.equal(copy[name], weights[name]) for name in weights)
    keep_start(recipe.run.dir, recipe.lora)  # of a run that is resumed


def test_a_checkpoints_adapter_of_other_settings_or_another_base_is_refused(tmp_path: Path):
    policy, folder = written(tmp_path)
    weights, base = adapter_weights(policy.model), AdapterBase.read(str(tmp_path / "llama"))
    check_adapter(folder, weights, LORA, base)
    for name, value in (("rank", 5), ("alpha", 64.0), ("targets", ("q_proj",))):
        with pytest.raises(SettingError, match=f"lora.{name}"):
            check_adapter(folder, weights, structs.replace(LORA, **{name: value}), base)
    other = tiny_policy(tmp_path / "other", seed=1)
    with pytest.raises(SettingError, match=r"model\.path: .*other.* is not the base model"):
        check_adapter(folder, weights, LORA, AdapterBase.read(str(other)))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"rank": 8}, r"lora\.rank: the adapter .* has 4, not 8"),
        ({}, {"alpha": 4.0}, r"lora\.alpha: the adapter .* has 8.*, not 4"),
        (
            {},
            {"targets": ("q_proj",)},
            r"lora\.targets: .* 14 layers \(down_proj, .*, but the run's has 2 layers \(q_proj\)",
        ),
        ({"use_rslora": True}, {}, r"lora\.path: .* use_rslora=True"),
        ({"use_dora": True, "bias": "all"}, {}, r"lora\.path: .* use_dora=True, bias=all"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, {}, r"lora\.path: .* target_parameters=.*experts"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, r"lora\.path: .* init_lora_weights=pissa_niter_4"),
        ({"init_lora_weights": "lora_ga"}, {}, r"lora\.path: .* init_lora_weights=lora_ga"),
        ({"init_lora_weights": "OLoRA"}, {}, r"lora\.path: .* init_lora_weights=OLoRA"),
        (
            {"kasa_config": {"beta": 1e-4}, "arrow_config": {"top_k": 3}},
            {},
            r"lora\.path: .* kasa_config=.*, arrow_config=",
        ),
        ({"peft_type": "LOHA"}, {}, r"lora\.path: .* peft_type=LOHA"),
    ],
)
def test_an_adapter_that_a_run_cannot_continue_is_refused(
    tmp_path: Path, config: dict[str, object], changes: dict[str, object], message: str
):
    _, folder = written(tmp_path)
    saved = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(saved | config))
    with pytest.raises(SettingError, match=message):
        started(folder, tmp_path / "llama", structs.replace(LORA, **changes))


@pytest.mark.parametrize("init", [True, False, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_an_adapter_whose_initialisation_leaves_the_base_is_continued(tmp_path: Path, init: bool | str):
    _, folder = written(tmp_path)
    saved = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(saved | {"init_lora_weights": init}))
    assert started(folder, tmp_path / "llama")


def test_an_adapter_of_another_base_or_without_its_files_is_refused(tmp_path: Path):
    _, folder = written(tmp_path)
    with pytest.raises(SettingError, match=r"model\.path: .*is not the base model"):
        started(folder, tiny_policy(tmp_path / "other", seed=1))
    with pytest.raises(SettingError, match=r"lora\.path: .* has the shape"):
        started(folder, tiny_policy(tmp_path / "wider", intermediate_size=128))
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(SettingError, match=r"lora\.path: .*adapter_model\.safetensors is not a complete"):
        started(folder, tmp_path / "llama")
    with pytest.raises(SettingError, match=r"lora\.path: .*llama has no adapter_config\.json"):
        started(tmp_path / "llama", tmp_path / "llama")


@pytest.mark.parametrize("text", ["[]", "3", "{"])
def test_a_damaged_configuration_of_an_adapter_is_refused(tmp_path: Path, text: str):
    policy, folder = written(tmp_path)
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(SettingError, match=r"lora\.path: .*adapter_config\.json"):
        started(folder, tmp_path / "llama")
    with pytest.raises(SettingError, match=r"run\.resume: .*adapter_config\.json"):
        check_adapter(folder, adapter_weights(policy.model), LORA, AdapterBase(str(tmp_path / "llama")))


def test_a_checkpoints_adapter_without_settings_or_weights_is_refused(tmp_path: Path):
    policy, folder = written(tmp_path)
    weights, base = adapter_weights(policy.model), AdapterBase.read(str(tmp_path / "llama"))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(SettingError, match=r"run\.resume: .*adapter_model\.safetensors is not a complete"):
        check_adapter(folder, weights, LORA, base)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingError, match=r"lora\.rank: .* has None, not 4"):
        check_adapter(folder, weights, LORA, base)


def test_the_digest_of_weights_does_not_depend_on_their_division_over_files(tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path))
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert weights_digest(tmp_path / "parts") == weights_digest(tmp_path / "llama")
    model.model.layers[1].mlp.up_proj.weight.data[7, 9] += 1e-6  # a single weight
    model.save_pretrained(tmp_path / "changed")
    assert weights_digest(tmp_path / "changed") != weights_digest(tmp_path / "llama")


@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.parametrize("settings", [LORA, LoraSettings(rank=2, alpha=3, targets=("q_proj", "down_proj"))])
def test_peft_loads_our_adapter_and_we_continue_pefts_with_equal_logits(tmp_path: Path, settings: LoraSettings):
    peft: Any = pytest.importorskip("peft")
    policy, folder = written(tmp_path, settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, str(folder))
    tokens = torch.tensor([random_prompts(1, 24)[0]])

    def logits(policy: Policy) -> torch.Tensor:
        return policy.logits(policy.forward_packed(tokens[0], torch.tensor([0, tokens.shape[1]])))

    with torch.no_grad():
        expected = model(tokens).logits[0]
        assert torch.allclose(expected, logits(policy), rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path / "pefts")
        start = started(tmp_path / "pefts", tmp_path / "llama", settings)
        again = load_policy(tmp_path / "llama", shard=lambda p: add_adapter(p.model, settings, 7, torch.float32, start))
        assert torch.allclose(expected, logits(again), rtol=0, atol=1e-5)
