"""Exact mode: the log-probabilities of generator and trainer are equal bit for bit."""

import pytest
import torch
from support.exact import packed_logprobs, run
from support.policies import LLAMA_LINE, STORIES, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams
from headrace.trainer.policy.exact.blocks import BlockOperators
from headrace.trainer.policy.model import load_policy


@pytest.fixture
def own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same_bits(path, dtype, completions, temperature=1.0):
    policy = load_policy(path, dtype, exact=True)
    found = torch.tensor([x for c in completions for x in c.logprobs])
    assert torch.equal(found, packed_logprobs(policy, completions, temperature))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LLAMA_LINE)
def test_generator_and_trainer_agree_bit_for_bit(tmp_path, family, dtype):
    path = tiny_policy(tmp_path, family, num_attention_heads=6, hidden_size=96)
    engine = Engine(path, dtype, max_running=13, exact=True, prefill_tokens=100)
    params = SamplingParams(max_new_tokens=90, temperature=0.8, ignore_eos=True)
    completions = run(engine, random_prompts(14, longest=150), params, num_samples=3)
    assert_same_bits(path, dtype, completions, temperature=0.8)


def test_an_element_of_a_gate_has_the_same_bits_under_any_number_of_threads(own_threads):
    operators = BlockOperators()
    gate, up = (4 * torch.randn(320, 2002)).chunk(2, -1)
    with torch.no_grad():
        expected = torch.cat([operators.gate(*rows) for rows in zip(gate.split(32), up.split(32), strict=True)])
        for num_threads in (1, 3, 6):
            torch.set_num_threads(num_threads)
            assert torch.equal(operators.gate(gate, up), expected)


@torch.no_grad()
def test_in_normal_mode_they_differ_by_the_rounding_of_fp32_alone():
    """Each is as far from the same policy in fp64 as from the other: only equal bits would allow a tighter bound."""
    completions = run(Engine(STORIES), [[1, 5 + i] for i in range(12)], SamplingParams(max_new_tokens=150))
    found = torch.tensor([x for c in completions for x in c.logprobs])
    trained = packed_logprobs(load_policy(STORIES), completions)
    precise = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float64).eval()
    exact = []
    for c in completions:
        logprobs = (
            precise(torch.tensor([c.prompt_ids + c.token_ids])).logits[0, len(c.prompt_ids) - 1 : -1].log_softmax(-1)
        )
        exact.append(logprobs.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0])
    of_each = [(x.double() - torch.cat(exact)).abs().mean() for x in (found, trained)]
    assert (found - trained).abs().mean() < sum(of_each) < 5e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agreement_survives_preemption_pauses_and_forks_of_a_real_policy(dtype):
    page_bytes = 2 * 5 * 64 * 4 * 8 * getattr(torch, dtype).itemsize
    engine = Engine(STORIES, dtype, max_running=16, exact=True, kv_gb=14.5 * page_bytes / 1e9)
    for index, prompt in enumerate(random_prompts(16, longest=120)):
        engine.add_group([1, *prompt], SamplingParams(max_new_tokens=60), [10 * index + i for i in range(4)])
    completions, num_steps = [], 0
    while not engine.idle:
        num_steps += 1
        if num_steps % 37 == 0 and engine.scheduler.running:
            engine.pause(engine.scheduler.running[-1].trajectory_id)
        if num_steps % 41 == 0 or not engine.scheduler.running:
            for sequence in list(engine.scheduler.paused):
                engine.resume(sequence.trajectory_id)
        completions += engine.step()
    assert len(completions) == 64 and engine.scheduler.num_preempted > 0
    assert_same_bits(STORIES, dtype, completions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_cache", [False, True])
def test_agreement_survives_migration(tmp_path, dtype, with_cache):
    path = tiny_policy(tmp_path, "qwen2")
    here, there = (Engine(path, dtype, exact=True) for _ in range(2))
    for index, prompt in enumerate(random_prompts(8, longest=120)):
        here.add_group(prompt, SamplingParams(max_new_tokens=80, ignore_eos=True), [index])
    completions = []
    for _ in range(25):
        completions += here.step()
    there.import_sequences(here.export_sequences(range(0, 8, 2), with_cache))
    while not (here.idle and there.idle):
        completions += [*here.step(), *there.step()]
    assert len(completions) == 8
    assert_same_bits(path, dtype, completions)


def test_gradients_of_an_exact_forward_are_those_of_a_plain_one(tmp_path):
    path = tiny_policy(tmp_path, "qwen3")
    tokens = torch.tensor([t for p in random_prompts(5, 90) for t in p])
    gradients = []
    for exact in (False, True):
        policy = load_policy(path, exact=exact)
        logprobs, entropy = policy.token_logprobs(
            policy.forward_packed(tokens, torch.tensor([0, 70, len(tokens)])), tokens
        )
        (logprobs.sum() + entropy.sum()).backward()
        gradients.append({name: weight.grad for name, weight in policy.weights().items()})
    for name, plain in gradients[0].items():
        assert (plain - gradients[1][name]).abs().max() <= 1e-4 * plain.abs().max(), name


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_a_trainer_with_fp32_weights_agrees_with_a_generator_in_bfloat16(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    with torch.no_grad():
        policy = load_policy(path)
        for weight in policy.weights().values():
            weight.add_(1e-3 * torch.randn_like(weight))  # numbers that bfloat16 does not have
        policy.model.save_pretrained(path)
    completions = run(
        Engine(path, "bfloat16", exact=True), random_prompts(4, longest=90), SamplingParams(max_new_tokens=20)
    )
    policy.make_exact(torch.bfloat16)
    logprobs = packed_logprobs(policy, completions)
    assert torch.equal(torch.tensor([x for c in completions for x in c.logprobs]), logprobs)


def test_exact_mode_is_refused_by_name_for_a_family_without_it(tmp_path):
    with pytest.raises(SettingError, match=r"generator\.exact is not available for model type 'gemma2'"):
        Engine(tiny_policy(tmp_path, "gemma2"), exact=True)


def test_a_machine_whose_kernels_differ_is_refused(tmp_path):
    engine = Engine(tiny_policy(tmp_path), exact=True)
    policy = engine.policy
    assert policy.exact is not None
    with torch.no_grad():
        # The packed forward has other weights than the head that the engine prepared.
        engine.runner.head._wide = policy.head.weight.t() * (1 + 1e-6)
    with pytest.raises(SettingError, match=r"generator\.exact: the kernels of this machine"):
        engine.generate([[5, 6, 7]])
