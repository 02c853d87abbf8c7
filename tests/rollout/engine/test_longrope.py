"""LongRoPE: at the first token beyond the short frequencies the cache is computed again, as transformers' `generate` does."""

from typing import Any

import pytest
import torch
from support.policies import LONGROPE, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.rollout import Engine, SamplingParams
from headrace.trainer.policy.model import load_policy

SWITCH = 64


def trained_logprobs(policy, completion):
    tokens = torch.tensor(completion.prompt_ids + completion.token_ids)
    with torch.no_grad():
        hidden = policy.forward_packed(tokens[:-1], torch.tensor([0, len(tokens) - 1]))
        return policy.token_logprobs(hidden, tokens[1:])[0][len(completion.prompt_ids) - 1 :]


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
def test_greedy_tokens_are_those_of_transformers_across_the_switch(tmp_path, hidden_act):
    path = tiny_policy(tmp_path, "phi3", hidden_act=hidden_act, **LONGROPE)
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = (
        None  # without a cache: transformers 5.17 forgets tokens when it computes it again
    )
    policy, engine = load_policy(path), Engine(path, max_running=4, prefill_tokens=50)
    prompts = [[5 + i for i in range(n)] for n in (3, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 2, 90)]
    params = SamplingParams(max_new_tokens=80, temperature=0.0, ignore_eos=True)
    for completion in engine.generate(prompts, params):
        prompt = torch.tensor([completion.prompt_ids])
        mask = torch.ones_like(prompt)
        expected = model.generate(prompt, attention_mask=mask, max_new_tokens=80, do_sample=False, use_cache=False)[0]
        assert completion.token_ids == expected[prompt.shape[1] :].tolist()
        assert (torch.tensor(completion.logprobs) - trained_logprobs(policy, completion)).abs().max() < 1e-5
    assert engine.num_recomputed == 3 * SWITCH, "prompts of up to SWITCH tokens cross the switch while they decode"


@pytest.mark.parametrize("exact", [False, True])
def test_logprobs_stay_right_through_groups_pauses_and_moves(tmp_path, exact):
    path = tiny_policy(tmp_path, "phi3", **LONGROPE)
    policy = load_policy(path, exact=exact)
    engine, other = (Engine(path, max_running=6, prefill_tokens=40, exact=exact) for _ in range(2))
    for index, prompt in enumerate(random_prompts(5, longest=70)):
        params = SamplingParams(max_new_tokens=75, ignore_eos=True)
        engine.add_group(prompt, params, [10 * index + sample for sample in range(3)])
    completions, num_steps = [], 0
    while not (engine.idle and other.idle):
        num_steps += 1
        if num_steps % 7 == 0 and engine.scheduler.running:
            engine.pause(engine.scheduler.running[num_steps % len(engine.scheduler.running)].trajectory_id)
        if num_steps % 9 == 0 or not engine.scheduler.running:
            for sequence in list(engine.scheduler.paused):
                if not engine.resume(sequence.trajectory_id, [9, 11, 13]):
                    engine.resume(sequence.trajectory_id)  # they leave no room
        if num_steps % 31 == 0 and engine.scheduler.running:
            moved = engine.scheduler.running[-1].trajectory_id
            other.import_sequences(engine.export_sequences([moved], with_cache=True))
        completions += [*engine.step(), *other.step()]
        engine.check()
    assert len(completions) == 15 and engine.num_recomputed > 0
    for completion in completions:
        inserted = torch.tensor(completion.logprobs) == 0
        difference = torch.where(inserted, 0, torch.tensor(completion.logprobs) - trained_logprobs(policy, completion))
        assert difference.abs().max() < 1e-5 if not exact else (difference == 0).all()
