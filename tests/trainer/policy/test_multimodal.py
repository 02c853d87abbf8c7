"""The language model of a multimodal Gemma 3 checkpoint: loaded alone, trained, exported as a text model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.policies import SIZES, character_tokenizer, random_prompts
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams
from headrace.trainer.export import save_policy
from headrace.trainer.policy.model import load_policy

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
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
