"""The LM head: log-probabilities, entropies and their gradients are those of the formula, in little memory."""

import subprocess
import sys

import pytest
import torch
from support.policies import tiny_policy

from headrace.trainer.policy import lm_head
from headrace.trainer.policy.decoder import Head
from headrace.trainer.policy.exact.blocks import BlockOperators
from headrace.trainer.policy.lm_head import LogitsHead
from headrace.trainer.policy.model import load_policy


def formula(hidden, weight, targets, temperature, divisor, softcap):
    """log softmax and -sum p log p of cap(W h), with all logits in memory, in the type of the arguments."""
    logits = hidden @ weight.t() / divisor
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def combined(values, tilt, of):
    """A number with a gradient of log-probabilities, entropies or both, of another size for each token."""
    terms = [value @ sign.to(value.dtype) for value, sign in zip(values, tilt, strict=True)]
    return {"log-probs": terms[0], "entropy": terms[1], "both": terms[0] + terms[1]}[of]


@pytest.mark.parametrize(
    ("temperature", "divisor", "softcap"), [(1.0, 1.0, None), (0.7, 1.0, 3.0), (1.3, 8.0, None), (0.7, 2.0, 1.5)]
)
@pytest.mark.parametrize("of", ["log-probs", "entropy", "both"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str)
def test_values_and_gradients_are_those_of_the_formula_in_float64(
    monkeypatch, temperature, divisor, softcap, of, dtype, bound
):
    monkeypatch.setattr(lm_head, "_PART_ROWS", 40)
    monkeypatch.setitem(lm_head._CHUNK_BYTES, "cpu", 1)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((70, 12), (41, 12)))
    targets, tilt = torch.randint(41, (70,)), torch.randn(2, 70)
    wide = hidden.double(), weight.double()
    lean = LogitsHead(weight, dtype, divisor=divisor, softcap=softcap)
    expected = formula(*wide, targets, temperature, divisor, softcap)
    found = lean.token_logprobs(hidden, targets, temperature)
    wanted_gradients, gradients = (
        torch.autograd.grad(combined(values, tilt, of), (hidden, weight)) for values in (expected, found)
    )
    for value, wanted in zip(found, expected, strict=True):
        assert (value - wanted).abs().max() < bound
    for gradient, wanted in zip(gradients, wanted_gradients, strict=True):
        assert (gradient - wanted).abs().max() <= bound * wanted.abs().max()


def test_logits_and_log_probs_are_made_of_the_same_bits():
    torch.manual_seed(0)
    hidden, targets = torch.randn(64, 12), torch.randint(41, (64,))
    lean = LogitsHead(torch.randn(41, 12), torch.float32, exact=BlockOperators())
    expected = torch.log_softmax(lean.logits(hidden) * (1 / 0.7), -1).gather(1, targets[:, None])[:, 0]
    assert torch.equal(lean.token_logprobs(hidden, targets, 0.7)[0], expected)


@pytest.mark.parametrize("is_rising", [False, True])
def test_the_largest_logit_may_be_in_any_part_of_the_vocabulary(monkeypatch, is_rising):
    """Logits of hundreds: without the shift by the largest one their exponentials are infinite, with that of another part 0."""
    monkeypatch.setitem(lm_head._CHUNK_BYTES, "cpu", 1)
    torch.manual_seed(0)
    slope = torch.linspace(-300, 300, 200)[:, None] * (1 if is_rising else -1)
    hidden, weight = torch.ones(3, 1), slope + torch.randn(200, 1)
    targets = torch.tensor([0, 100, 199])
    found = LogitsHead(weight, torch.float32).token_logprobs(hidden, targets, 1.0)
    expected = formula(hidden.double(), weight.double(), targets, 1.0, 1.0, None)
    for value, wanted in zip(found, expected, strict=True):
        assert (value - wanted).abs().max() < 1e-4


def test_a_head_in_bfloat16_has_the_log_probs_of_the_generators_head(tmp_path):
    """Both round hidden states and weights, and sum in fp32: all that differs is the order of the sums."""
    path = tiny_policy(tmp_path, "llama")
    trained, policy = load_policy(path), load_policy(path, "bfloat16")
    torch.manual_seed(0)
    hidden, targets = torch.randn(70, policy.config.hidden_size), torch.randint(policy.vocab_size, (70,))
    logits = Head(policy)(hidden.bfloat16(), torch.empty(70, policy.vocab_size))
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = trained.token_logprobs(hidden, targets, dtype=torch.bfloat16)[0]
    assert (found - expected).abs().max() < 1e-5
    assert (trained.token_logprobs(hidden, targets)[0] - expected).abs().max() > 1e-4, "of unrounded numbers"


def test_a_frozen_head_gets_no_gradient():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 12, requires_grad=True), torch.randn(41, 12)
    LogitsHead(weight, torch.float32).token_logprobs(hidden, torch.arange(5), 1.0)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


PEAK = """
import torch
from headrace.trainer.policy.lm_head import LogitsHead

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

hidden, weight = torch.randn(2048, 32, requires_grad=True), torch.randn(150_000, 32, requires_grad=True)
targets = torch.randint(150_000, (2048,))
before = kilobytes("VmRSS")
logprobs, entropy = LogitsHead(weight, torch.float32).token_logprobs(hidden, targets, 1.0)
logprobs.sum().backward()
print((kilobytes("VmHWM") - before) / 1e3)
"""


def test_log_probs_of_2048_tokens_of_150000_words_take_little_memory():
    """All logits would take 1,229 MB, and their gradient the same again."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) <= 400
