"""The language models of multimodal checkpoints: loaded and trained alone, exported with the other parts as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import FAMILIES, SIZES, character_tokenizer, random_prompts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from headrace.comm.errors import SettingError
from headrace.comm.recipe import LoraSettings
from headrace.rollout import Engine, SamplingParams
from headrace.trainer.export import export, save_policy
from headrace.trainer.policy.adapter_files import AdapterBase
from headrace.trainer.policy.families import Widths, text_part
from headrace.trainer.policy.model import load_policy

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip

QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any]:
    """A random policy with a vision part, and transformers' model of it."""
    torch.manual_seed(0)
    text = SIZES | {"sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    character_tokenizer().save_pretrained(tmp_path / "whole")
    return tmp_path / "whole", model


def rename(path: Path, before: str, after: str) -> None:
    file = path / "model.safetensors"
    weights = {name.replace(before, after): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_computes_what_the_whole_computes_on_text(checkpoint, prefix):
    path, model = checkpoint
    rename(path, "language_model.model.", prefix)
    policy, tokens = load_policy(path), torch.arange(4, 90)
    logits = policy.logits(policy.forward_packed(tokens, torch.tensor([0, len(tokens)])))
    assert (logits - model(tokens[None]).logits[0]).abs().max() < 5e-5


def test_the_engine_generates_what_transformers_generates(checkpoint):
    path, model = checkpoint
    model.generation_config.eos_token_id = None
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    for completion in Engine(path, max_running=2).generate(random_prompts(2, longest=50), params):
        prompt = torch.tensor([completion.prompt_ids])
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
        assert generated[0, prompt.shape[1] :].tolist() == completion.token_ids


@torch.no_grad()
def test_an_export_is_a_text_model_with_the_same_logits(checkpoint, tmp_path):
    policy = load_policy(checkpoint[0])
    for weight in policy.weights().values():
        weight.add_(0.01)
    save_policy(policy, tmp_path / "after", character_tokenizer())
    assert json.loads((tmp_path / "after/config.json").read_text())["model_type"] == "gemma3_text"
    tokens = torch.arange(4, 60)
    cu_seqlens = torch.tensor([0, len(tokens)])
    logits = policy.logits(policy.forward_packed(tokens, cu_seqlens))
    loaded, again = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval(), load_policy(tmp_path / "after")
    assert torch.allclose(loaded(tokens[None]).logits[0], logits, atol=2e-5)
    assert torch.allclose(again.logits(again.forward_packed(tokens, cu_seqlens)), logits, atol=2e-5)


def test_a_quantized_one_is_refused(checkpoint):
    file = checkpoint[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(SettingError, match="gemma3_text with quantized weights"):
        load_policy(checkpoint[0])


GLM_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "image_size": 16, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip

GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}


def whole_config(family: str) -> Any:
    """transformers' configuration of a small policy with vision."""
    if family.startswith("glm4v"):
        text = SIZES | FAMILIES[family.replace("v", "")] | {"rope_parameters": GLM_ROPE}
        text = {name: value for name, value in text.items() if name != "use_qk_norm"}
        return AutoConfig.for_model(family, text_config=text, vision_config=GLM_VISION, image_token_id=120)
    text = SIZES | FAMILIES[f"{family}_text"] | {"model_type": f"{family}_text"}
    return AutoConfig.for_model(family, text_config=text, vision_config=QWEN_VISION, image_token_id=120)


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "qwen3_5_moe fused", "glm4v", "glm4v_moe"])
def whole(request, tmp_path: Path) -> tuple[Path, Any]:
    """A random policy with vision and a prediction of several tokens, and transformers' model of it."""
    torch.manual_seed(0)
    family, _, form = request.param.partition(" ")
    model = AutoModelForImageTextToText.from_config(whole_config(family)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("bias", "norm.weight")):
                tensor.add_(0.2 * torch.randn(tensor.shape))
    path = tmp_path / "whole"
    model.save_pretrained(path, save_original_format=not form)
    character_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text("{}")
    file = path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.randn(3, 5).bfloat16()}, file, {"format": "pt"})
    return path, model


@torch.no_grad()
def test_an_export_has_the_other_parts_of_its_checkpoint_bit_for_bit(whole, tmp_path):
    path, model = whole
    policy, tokens = load_policy(path), torch.arange(4, 90)
    assert Widths.of(text_part(json.loads((path / "config.json").read_text()))) == policy.widths
    cu_seqlens = torch.tensor([0, len(tokens)])
    logits = policy.logits(policy.forward_packed(tokens, cu_seqlens))
    assert (logits - model(tokens[None]).logits[0]).abs().max() < 5e-5
    for weight in policy.weights().values():
        weight.add_(0.01)
    logits = policy.logits(policy.forward_packed(tokens, cu_seqlens))
    step, weights = tmp_path / "run" / "step_1", {name: weight.detach() for name, weight in policy.weights().items()}
    export(step, policy, weights, character_tokenizer(), LoraSettings(), AdapterBase(str(path)))
    before = load_file(path / "model.safetensors")
    index = json.loads((step / "hf/model.safetensors.index.json").read_text())
    after = {
        name: tensor
        for file in {*index["weight_map"].values()}
        for name, tensor in load_file(step / "hf" / file).items()
    }
    assert before.keys() == after.keys() == index["weight_map"].keys()
    others = [name for name in before if name.startswith(("model.visual.", "mtp.")) or name.endswith("correction_bias")]
    assert len(others) > 10
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name in others), name
        assert tensor.dtype == after[name].dtype
    assert json.loads((step / "hf/config.json").read_text())["model_type"] == model.config.model_type
    assert (step / "hf/preprocessor_config.json").exists()
    loaded, again = AutoModelForImageTextToText.from_pretrained(step / "hf").eval(), load_policy(step / "hf")
    assert (loaded(tokens[None]).logits[0] - logits).abs().max() < 5e-5
    assert torch.equal(again.logits(again.forward_packed(tokens, cu_seqlens)), logits)


def test_without_its_checkpoint_an_export_is_the_language_model_alone(whole, tmp_path, caplog):
    path, _ = whole
    policy = load_policy(path)
    weights = {name: weight.detach() for name, weight in policy.weights().items()}
    path.rename(tmp_path / "elsewhere")
    export(tmp_path / "run/step_1", policy, weights, None, LoraSettings(), AdapterBase(str(path)))
    assert "is the language model alone: model.path" in caplog.text
    assert not load_policy(tmp_path / "run/step_1/hf").is_part
