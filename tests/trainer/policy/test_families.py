"""Every model family: the trainer's numbers are those of transformers in float64, and an export is the same policy."""

import pytest
import torch
from support.float64 import in_float64
from support.policies import FAMILIES, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.relay.weights.layout import Layout
from headrace.trainer.export import save_policy
from headrace.trainer.policy.families import FAMILIES as DECLARED
from headrace.trainer.policy.loading import persistent_buffers
from headrace.trainer.policy.model import load_policy
from headrace.trainer.policy.tensor_parallel import splits_for

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    *((family, {"tie_word_embeddings": True}) for family in ("llama", "smollm3", "granite", "olmo2", "gpt_oss")),
    *((family, {"tie_word_embeddings": False}) for family in ("gemma", "gemma3_text")),
    ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 24, "attention_bias": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LINEAR}}),
    ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "norm_topk_prob": True}),
    ("gpt_oss", {"rope_parameters": YARN, "attention_bias": False, "swiglu_limit": 7.0}),
]  # fmt: skip


def reference_of(path):
    """transformers' own policy in float64, by its plainest code."""
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **kernels).eval()


def packed(prompts):
    lengths = torch.tensor([0, *(len(p) for p in prompts)])
    return torch.tensor([t for p in prompts for t in p]), lengths.cumsum(0)


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_logprobs_entropy_and_gradient_are_those_of_transformers(tmp_path, family, changes):
    path = tiny_policy(tmp_path, family, **changes)
    policy, reference = load_policy(path), reference_of(path)
    prompts = random_prompts(5, longest=150)
    tokens, cu_seqlens = packed(prompts)
    targets = tokens.roll(-1)
    logprobs, entropy = policy.token_logprobs(policy.forward_packed(tokens, cu_seqlens), targets)
    with in_float64():
        every = torch.cat([reference(torch.tensor([p])).logits[0] for p in prompts]).log_softmax(-1)
    expected, expected_entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    assert (logprobs - expected).abs().max() < 1e-5 and (entropy - expected_entropy).abs().max() < 1e-5
    weights = torch.rand(len(tokens))
    (logprobs * weights + 0.1 * entropy).sum().backward()
    (expected * weights + 0.1 * expected_entropy).sum().backward()
    for name, weight in policy.weights().items():
        gradient = reference.get_parameter(name).grad
        assert gradient is not None and weight.grad is not None, name
        assert (weight.grad - gradient).abs().max() <= 1e-5 * max(1.0, gradient.abs().max().item()), name


@pytest.mark.parametrize("family", [*FAMILIES])
def test_packed_rows_have_the_hidden_states_and_gradients_of_rows_alone(tmp_path, family):
    policy = load_policy(tiny_policy(tmp_path, family))
    prompts = random_prompts(7, longest=150)
    weights = [torch.randn(len(prompt), 64, dtype=torch.float64) for prompt in prompts]
    found = []
    with in_float64(policy):
        for rows in ([*range(7)], *([index] for index in range(7))):
            hidden = policy.forward_packed(*packed([prompts[index] for index in rows]))
            policy.zero_grad()
            (hidden * torch.cat([weights[index] for index in rows])).sum().backward()
            gradients = [weight.grad for weight in policy.weights().values() if weight.grad is not None]
            found.append((hidden.detach(), [gradient.clone() for gradient in gradients]))
    (together, gradients), *alone = found
    assert (together - torch.cat([hidden for hidden, _ in alone])).abs().max() < 1e-11
    for gradient, *parts in zip(gradients, *(of_row for _, of_row in alone), strict=True):
        assert (gradient - sum(parts)).abs().max() <= 1e-11 * max(1.0, gradient.abs().max().item())


@pytest.mark.parametrize("family", [*FAMILIES])
def test_buffers_of_a_checkpoint_are_in_a_policy_without_weights_and_in_an_export_of_gathered_weights(tmp_path, family):
    policy = load_policy(path := tiny_policy(tmp_path, family))
    buffers = persistent_buffers(policy.model)
    assert bool(buffers) == DECLARED[family].has_buffers
    empty = persistent_buffers(load_policy(path, "bfloat16", weights=False).model)
    save_policy(policy, tmp_path / "after", weights={name: w.detach() for name, w in policy.weights().items()})
    exported = persistent_buffers(load_policy(tmp_path / "after").model)
    for name, buffer in buffers.items():
        assert buffer.dtype == empty[name].dtype == torch.float32 and buffer.abs().max() > 0
        assert torch.equal(buffer, empty[name]) and torch.equal(buffer, exported[name])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_an_export_gives_the_same_logits_in_transformers(tmp_path, family, tied):
    policy = load_policy(tiny_policy(tmp_path / "before", family, tie_word_embeddings=tied))
    save_policy(policy, tmp_path / "after")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation="eager").eval()
    tokens = torch.arange(4, 80)
    with torch.no_grad():
        logits = policy.logits(policy.forward_packed(tokens, torch.tensor([0, len(tokens)])))
        assert torch.allclose(loaded(tokens[None]).logits[0], logits, atol=2e-5)
    assert ("lm_head.weight" in policy.weights()) is not tied


@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_buffer_of_a_pushed_version_holds_every_weight(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    full, empty = load_policy(path), load_policy(path, weights=False)
    weights = full.weights()
    layout = Layout.of(weights, "float32", 1, splits_for(weights, full.config))
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    for name, weight in weights.items():
        views[name].copy_(weight.detach())
    empty.bind(views)
    tokens, cu_seqlens = packed(random_prompts(3, longest=80))
    with torch.no_grad():
        found, expected = (policy.forward_packed(tokens, cu_seqlens) for policy in (empty, full))
    assert torch.allclose(found, expected, atol=1e-5)


def test_every_declared_family_is_tested():
    assert {*DECLARED} == {*FAMILIES}
