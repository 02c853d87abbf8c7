"""The engine on a GPU: kernels, captured steps, weights overwritten in place."""

import pytest
import torch
from support.exact import packed_logprobs, run
from support.policies import plain_logprobs, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.rollout import Engine, SamplingParams
from headrace.trainer.policy.model import load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("attention", ["triton", "gather"])
def test_logprobs_on_a_gpu_are_those_of_transformers(tmp_path, family, attention):
    path = tiny_policy(tmp_path, family)
    engine = Engine(path, max_running=7, attention=attention)
    # transformers 5.17 leaves out soft caps in its other attention.
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for completion in engine.generate(random_prompts(12, longest=120), SamplingParams(max_new_tokens=60, n=2)):
        expected = plain_logprobs(model, completion.prompt_ids, completion.token_ids)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-3
    engine.check()


def test_captured_steps_give_what_eager_steps_give(tmp_path):
    path = tiny_policy(tmp_path)
    prompts, params = random_prompts(20, longest=120), SamplingParams(max_new_tokens=60, n=2)
    captured, eager = Engine(path, max_running=13), Engine(path, max_running=13)
    eager.runner._graphs = None
    found = [[c.token_ids for c in engine.generate(prompts, params)] for engine in (captured, eager)]
    assert found[0] == found[1]


def test_captured_steps_follow_weights_overwritten_in_place(tmp_path):
    policy = load_policy(tiny_policy(tmp_path / "a"), device="cuda")
    other = load_policy(tiny_policy(tmp_path / "b", seed=1), device="cuda")
    params = SamplingParams(max_new_tokens=20, temperature=0)
    expected = Engine(other).generate([[5, 6, 7]], params)[0].token_ids
    engine = Engine(policy)
    engine.generate([[5, 6, 7]], params)
    with torch.no_grad():
        for name, weight in policy.weights().items():
            weight.copy_(other.weights()[name])
    engine.weights_changed()
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_in_exact_mode_generator_and_trainer_agree_bit_for_bit(tmp_path, family, dtype):
    path = tiny_policy(tmp_path, family, num_attention_heads=6, hidden_size=96)
    engine = Engine(path, dtype, max_running=13, exact=True, prefill_tokens=100)
    assert engine.runner._graphs is not None
    params = SamplingParams(max_new_tokens=90, temperature=0.8, ignore_eos=True)
    completions = run(engine, random_prompts(14, longest=150), params, num_samples=3)
    policy = load_policy(path, "float32", "cuda")
    policy.make_exact(getattr(torch, dtype))
    found = torch.tensor([x for c in completions for x in c.logprobs])
    assert torch.equal(found, packed_logprobs(policy, completions, temperature=0.8))


def test_a_packed_half_precision_forward_is_near_the_cpu_s(tmp_path):
    path = tiny_policy(tmp_path, "qwen2")
    tokens, lengths = torch.arange(4, 94), torch.tensor([0, 30, 90])
    reference, policy = load_policy(path), load_policy(path, "bfloat16", "cuda")
    with torch.no_grad():
        expected = reference.logits(reference.forward_packed(tokens, lengths)).log_softmax(-1)
        found = policy.logits(policy.forward_packed(tokens.cuda(), lengths)).log_softmax(-1)
    assert (found.cpu() - expected).abs().mean() < 0.1


def test_filters_and_penalties_draw_what_the_cpu_draws(tmp_path):
    """A rounding apart, by which a number at the border between two tokens may select the other one."""
    path, prompts = tiny_policy(tmp_path), random_prompts(20, longest=120)
    params = [
        SamplingParams(max_new_tokens=20, top_k=2 * i, top_p=0.9, min_p=0.01, repetition_penalty=1.2) for i in range(20)
    ]
    here, there = (Engine(path, max_running=9, device=device).generate(prompts, params) for device in ("cuda", "cpu"))
    assert sum(a.token_ids == b.token_ids for a, b in zip(here, there, strict=True)) >= 18


def test_a_steady_captured_step_never_waits_for_the_gpu(tmp_path):
    engine = Engine(tiny_policy(tmp_path), max_running=8)
    engine.add_group([5, 6, 7], SamplingParams(max_new_tokens=200, ignore_eos=True), range(8))
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(80):  # rows gain a page meanwhile
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
