"""Model families: log-probabilities and packed forwards are those of transformers."""

import json

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
def test_a_family_s_packed_forward_is_that_of_transformers(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    policy, reference = (
        load_policy(path),
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval(),
    )
    prompts = random_prompts(7, longest=100)
    tokens = torch.tensor([t for p in prompts for t in p])
    lengths = torch.tensor([0, *(len(p) for p in prompts)]).cumsum(0)
    logits = policy.logits(policy.forward_packed(tokens, lengths))
    expected = torch.cat([reference(torch.tensor([p])).logits[0] for p in prompts])
    assert (logits - expected).abs().max() < 5e-5
    logits.logsumexp(-1).sum().backward()
    expected.logsumexp(-1).sum().backward()
    name = "model.layers.0.input_layernorm.weight"
    gradient, wanted = policy.weights()[name].grad, reference.get_parameter(name).grad
    assert gradient is not None and wanted is not None
    assert (gradient - wanted).abs().max() <= 2e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("family", "changes", "feature"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_a_feature_that_would_be_computed_wrongly_is_refused_by_its_name(tmp_path, family, changes, feature):
    path = tiny_policy(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SettingError, match=f"model.path: {family} with {feature}"):
        Engine(path)
