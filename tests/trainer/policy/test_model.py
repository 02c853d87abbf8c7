"""The policy computes the logits and gradients of transformers, and refuses checkpoints that it would compute wrongly."""

import json

import pytest
import torch
from support.policies import character_tokenizer, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.comm.errors import SettingError
from headrace.trainer.export import save_policy
from headrace.trainer.policy.model import load_policy, load_tokenizer


def packed(prompts):
    lengths = torch.tensor([0, *(len(p) for p in prompts)])
    return torch.tensor([t for p in prompts for t in p]), lengths.cumsum(0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_packed_forward_gives_each_sequence_the_logits_that_it_has_alone(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    policy, reference = load_policy(path), AutoModelForCausalLM.from_pretrained(path).eval()
    prompts = random_prompts(9, longest=100)
    with torch.no_grad():
        logits = policy.logits(policy.forward_packed(*packed(prompts)))
        expected = torch.cat([reference(torch.tensor([p])).logits[0] for p in prompts])
    assert (logits - expected).abs().max() < 5e-5


def test_gradients_of_token_logprobs_are_those_of_transformers(tmp_path):
    path = tiny_policy(tmp_path)
    policy, reference = load_policy(path), AutoModelForCausalLM.from_pretrained(path).eval()
    prompts = random_prompts(7, longest=100)
    tokens, cu_seqlens = packed(prompts)
    targets = tokens.roll(-1)
    logprobs, entropy = policy.token_logprobs(policy.forward_packed(tokens, cu_seqlens), targets)
    (logprobs.sum() + entropy.sum()).backward()
    expected = torch.cat([reference(torch.tensor([p])).logits[0] for p in prompts]).log_softmax(-1)
    expected_entropy = -(expected.exp() * expected).sum(-1)
    (expected.gather(1, targets[:, None]).sum() + expected_entropy.sum()).backward()
    assert torch.allclose(entropy, expected_entropy, atol=1e-4)
    for name, weight in policy.weights().items():
        gradient = reference.get_parameter(name).grad
        assert gradient is not None and weight.grad is not None
        assert torch.allclose(weight.grad, gradient, rtol=1e-3, atol=2e-4 * gradient.abs().max().item()), name


def test_a_saved_policy_gives_the_same_logits_when_loaded_by_transformers(tmp_path):
    policy = load_policy(tiny_policy(tmp_path / "before"))
    with torch.no_grad():
        for weight in policy.weights().values():
            weight.add_(0.01)
    save_policy(policy, tmp_path / "after", character_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()
    tokens = torch.arange(4, 60)
    with torch.no_grad():
        logits = policy.logits(policy.forward_packed(tokens, torch.tensor([0, len(tokens)])))
        assert torch.allclose(loaded(tokens[None]).logits[0], logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "after").encode("hello") == character_tokenizer().encode("hello")


def test_stop_tokens_are_those_of_generation_config_and_tokenizer(tmp_path):
    path = tiny_policy(tmp_path)
    assert load_policy(path, weights=False).stop_ids == {2}
    model = AutoModelForCausalLM.from_pretrained(path)
    model.generation_config.eos_token_id = [7, 9]
    model.generation_config.save_pretrained(path)
    assert load_policy(path, weights=False).stop_ids == {2, 7, 9}


def test_a_policy_without_weights_takes_views_as_its_parameters(tmp_path):
    path = tiny_policy(tmp_path, tie_word_embeddings=True)
    full, empty = load_policy(path), load_policy(path, weights=False)
    assert [*full.weights()] == [*empty.weights()] and "lm_head.weight" not in full.weights()
    empty.bind({name: weight.detach().clone() for name, weight in full.weights().items()})
    tokens = torch.arange(4, 60)
    with torch.no_grad():
        hidden = [p.forward_packed(tokens, torch.tensor([0, 20, 56])) for p in (full, empty)]
        assert torch.equal(*hidden) and torch.equal(full.logits(hidden[0]), empty.logits(hidden[1]))


def test_a_checkpoint_that_contradicts_its_configuration_is_refused(tmp_path):
    """The trainer reads the weights and the generator the configuration, so their policies would differ."""
    path = tiny_policy(tmp_path, tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(SettingError, match=r"model\.path: .* set tie_word_embeddings to false"):
        load_policy(path)


def test_a_setting_that_cannot_be_loaded_is_refused_by_name(tmp_path):
    with pytest.raises(SettingError, match=r"model\.path: no Hugging Face checkpoint"):
        load_policy(tmp_path)
    with pytest.raises(SettingError, match=r"model\.dtype: 'floaty' is not a floating-point type"):
        load_policy(tmp_path, "floaty")
    with pytest.raises(SettingError, match=r"model\.path: no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SettingError, match="model type 'gpt2' is not supported"):
        load_policy(tmp_path)


def test_the_code_of_a_model_folder_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question on the terminal"))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('the code of the folder ran')")
    with pytest.raises(SettingError, match=r"model\.path: no Hugging Face checkpoint"):
        load_policy(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_checkpointed_activations_give_the_same_gradients_bit_for_bit(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    plain, checkpointed = load_policy(path), load_policy(path)
    checkpointed.checkpoint_activations()
    tokens, cu_seqlens = packed(random_prompts(7, longest=100))
    for policy in (plain, checkpointed):
        policy.token_logprobs(policy.forward_packed(tokens, cu_seqlens), tokens.roll(-1))[0].sum().backward()
    for name, weight in plain.weights().items():
        found = checkpointed.weights()[name].grad
        assert found is not None and weight.grad is not None
        assert torch.equal(found, weight.grad), name
