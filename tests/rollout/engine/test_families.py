"""Model families: the generator's tokens and log-probabilities are those of transformers."""

import json
from typing import Any

import pytest
import torch
from support.policies import FAMILIES, plain_logprobs, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams
from headrace.trainer.policy.model import load_policy


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_family_s_logprobs_are_those_of_transformers(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    engine = Engine(path, max_running=7, prefill_tokens=50)
    for index, prompt in enumerate(random_prompts(6, longest=120)):
        engine.add_group(prompt, SamplingParams(max_new_tokens=70, ignore_eos=True), [10 * index + i for i in range(3)])
    while not engine.idle:
        for completion in engine.step():
            expected = plain_logprobs(model, completion.prompt_ids, completion.token_ids)
            assert (torch.tensor(completion.logprobs) - expected).abs().max() < 2e-5
        engine.check()


@pytest.mark.parametrize("family", [*FAMILIES])
def test_greedy_tokens_are_those_of_transformers_and_logprobs_those_of_the_trainer(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    policy, engine = load_policy(path), Engine(path, max_running=4)
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    for completion in engine.generate(random_prompts(3, longest=70, seed=1), params):
        tokens = torch.tensor(completion.prompt_ids + completion.token_ids)
        count = len(completion.prompt_ids)
        generated = model.generate(
            tokens[None, :count],
            attention_mask=torch.ones(1, count),
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=-1,
        )
        assert generated[0].tolist() == tokens.tolist()
        with torch.no_grad():
            hidden = policy.forward_packed(tokens[:-1], torch.tensor([0, len(tokens) - 1]))
            logprobs = policy.token_logprobs(hidden, tokens[1:])[0][count - 1 :]
        assert (torch.tensor(completion.logprobs) - logprobs).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "changes", "feature"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act=gelu in recurrent layers"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"quantized weights .* mxfp4 .*dequantize=True",
        ),
    ],
)
def test_a_feature_that_would_be_computed_wrongly_is_refused_by_its_name(tmp_path, family, changes, feature):
    path = tiny_policy(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SettingError, match=f"model.path: {family} with {feature}"):
        Engine(path)
