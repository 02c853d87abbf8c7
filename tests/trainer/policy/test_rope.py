"""LongRoPE: each token is computed with the frequencies that its prefix had when transformers' `generate` drew it."""

from typing import Any

import pytest
import torch
from support.policies import LONGROPE, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.trainer.policy.model import load_policy
from headrace.trainer.policy.rope import RopeRows

SWITCH = 64


@pytest.mark.parametrize(("hidden_act", "exact"), [("silu", False), ("gelu", False), ("silu", True)])
def test_logprobs_and_gradient_are_those_of_the_forward_passes_that_drew_the_tokens(tmp_path, hidden_act, exact):
    path = tiny_policy(tmp_path, "phi3", hidden_act=hidden_act, **LONGROPE)
    policy = load_policy(path, exact=exact)
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    prompts = [
        *random_prompts(3, longest=60),
        *([7] * n for n in (SWITCH, SWITCH + 1)),
        *random_prompts(3, longest=150),
    ]
    tokens = torch.tensor([t for p in prompts for t in p])
    targets = tokens.roll(-1)
    hidden = policy.forward_packed(tokens, torch.tensor([0, *map(len, prompts)]).cumsum(0))
    logprobs, _ = policy.token_logprobs(hidden, targets)
    logits = []
    for prompt in prompts:
        logits.append(reference(torch.tensor([prompt[:SWITCH]])).logits[0])
        if len(prompt) > SWITCH:
            logits.append(reference(torch.tensor([prompt])).logits[0, SWITCH:])
    expected = torch.cat(logits).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-5
    logprobs.sum().backward()
    expected.sum().backward()
    for name, weight in policy.weights().items():
        gradient = reference.get_parameter(name).grad
        assert weight.grad is not None and (weight.grad - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max())


def test_without_two_sets_of_frequencies_a_row_is_a_position(tmp_path):
    rope = RopeRows(load_policy(tiny_policy(tmp_path), weights=False).config)
    assert rope.of_chunk(3, 90, 90) == range(3, 90) and rope.passes([5, 200]) is None
    assert not rope.must_recompute(64, 64)
