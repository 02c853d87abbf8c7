"""The attention of training: kernels are chosen by rule, and each computes causal attention of every sequence alone."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.policies import tiny_policy

from headrace.trainer.policy import attention, fused_attention
from headrace.trainer.policy.attention import (
    AttentionSpec,
    ChunkAttention,
    PackedAttention,
    takes_varlen,
    varlen_attention,
)
from headrace.trainer.policy.length_classes import length_classes
from headrace.trainer.policy.model import load_policy

LENGTHS = [1, 70, 33, 64, 70, 5, 130]
NUM_TOKENS = sum(LENGTHS)


def by_formula(query, key, value, lengths, key_lengths, spec):
    """softmax(scale q k) v over the keys that each query sees, sequence by sequence."""
    found, first, first_key = [], 0, 0
    for length, num_keys in zip(lengths, key_lengths, strict=True):
        q, (k, v) = query[first : first + length], (x[first_key : first_key + num_keys] for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        distance = torch.arange(num_keys - length, num_keys)[:, None] - torch.arange(num_keys)
        hidden = (distance < 0) | (distance >= (spec.window or math.inf))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, v))
        first, first_key = first + length, first_key + num_keys
    return torch.cat(found)


def inputs(num_heads, num_kv_heads, head_dim, dtype=torch.float64, count=NUM_TOKENS):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(count, heads, head_dim, dtype=dtype, requires_grad=True)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return query, key, value


def with_gradient(out, tensors):
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.randn(out.shape, dtype=torch.float64).to(out.dtype))]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (9, 3)])
def test_attention_in_bfloat16_on_a_cpu_and_its_gradient_are_those_of_the_formula(num_heads, num_kv_heads):
    """Rows of up to 128 tokens take batched products, the one of 130 PyTorch's kernel."""
    tensors, spec = inputs(num_heads, num_kv_heads, 16), AttentionSpec(0.3)
    expected = with_gradient(by_formula(*tensors, LENGTHS, LENGTHS, spec), tensors)
    query, key, value = (tensor.detach().bfloat16().requires_grad_() for tensor in tensors)
    found = with_gradient(PackedAttention(LENGTHS)(0, query, key, value, spec), (query, key, value))
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fused_kernel_of_a_cpu_gives_log_sum_exps_and_gradients_of_the_formula(is_causal, dtype, bound):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 8, dtype=dtype) for heads in (4, 2, 2))
    grad = torch.randn(2, 4, 40, 8, dtype=dtype)
    out, lse = fused_attention.fused_attention(q, k, v, 0.3, is_causal=is_causal)
    gradients = fused_attention.fused_attention_backward(grad, q, k, v, out, lse, 0.3, is_causal=is_causal)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = 0.3 * exact[0] @ exact[1].repeat_interleave(2, 1).transpose(2, 3)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(40, 40).tril().bool(), float("-inf"))
    wanted = scores.softmax(-1) @ exact[2].repeat_interleave(2, 1)
    wanted.backward(grad.double())
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-4
    pairs = [(out, wanted), *((found, x.grad) for found, x in zip(gradients, exact, strict=True))]
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("window", [None, 1, 20, 500])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_attention_in_fp32_on_a_cpu_and_its_gradient_are_those_of_the_formula(num_heads, num_kv_heads, window):
    tensors, spec = inputs(num_heads, num_kv_heads, 8, torch.float32), AttentionSpec(0.3, window)
    query, key, value = (x.detach().double().requires_grad_() for x in tensors)
    expected = with_gradient(by_formula(query, key, value, LENGTHS, LENGTHS, spec), (query, key, value))
    found = with_gradient(PackedAttention(LENGTHS)(0, *tensors, spec), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "softcap", "is_taken"),
    [
        ("cuda", torch.bfloat16, None, True),
        ("cuda", torch.float16, None, True),
        ("cuda", torch.float32, None, False),
        ("cuda", torch.bfloat16, 50.0, False),
        ("cpu", torch.bfloat16, None, False),
    ],
)
def test_the_varlen_kernel_is_for_half_precision_on_a_gpu(device, dtype, softcap, is_taken):
    assert takes_varlen(device, dtype, AttentionSpec(1.0, None, softcap)) == is_taken


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_under_autocast_attention_gets_half_precision(tmp_path, family):
    policy = load_policy(tiny_policy(tmp_path, family))
    seen = []

    def recorder(layer, query, key, value, spec):
        seen.extend((query.dtype, key.dtype, value.dtype))
        return query

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        policy(torch.tensor([1, 2, 3]), torch.arange(3), recorder)
    assert {*seen} == {torch.bfloat16}


@pytest.fixture(params=[True, False])
def kernel_by_formula(request, monkeypatch):
    """PyTorch's kernel, which runs on GPUs only, by the formula: of a version with grouped heads and of one without them."""
    calls = []

    def varlen_attn(
        query, key, value, starts, key_starts, longest, longest_key, *, scale, window_size, enable_gqa=False
    ):
        assert enable_gqa == (request.param and query.shape[1] != key.shape[1])
        assert enable_gqa or query.shape[1] == key.shape[1], "this version needs equally many heads"
        assert window_size[1] == 0, "causal"
        lengths, key_lengths = ([b - a for a, b in pairwise(s.tolist())] for s in (starts, key_starts))
        assert (longest, longest_key) == (max(lengths), max(key_lengths))
        calls.append(enable_gqa)
        window = None if window_size[0] < 0 else window_size[0] + 1
        return by_formula(query, key, value, lengths, key_lengths, AttentionSpec(scale, window))

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_HAS_GROUPS", request.param)
    return calls


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 20])
def test_the_varlen_kernel_gets_key_heads_as_they_are_where_the_version_allows(kernel_by_formula, num_kv_heads, window):
    tensors, spec = inputs(4, num_kv_heads, 8), AttentionSpec(0.3, window)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = varlen_attention(*tensors, (starts, starts), (max(LENGTHS), max(LENGTHS)), spec)
    torch.testing.assert_close(out, by_formula(*tensors, LENGTHS, LENGTHS, spec))
    assert kernel_by_formula


@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_of_long_prompts_see_all_tokens_before_them(kernel_by_formula, monkeypatch, is_varlen, window):
    monkeypatch.setattr(attention, "takes_varlen", lambda *_: is_varlen)
    (query, key, value), spec = inputs(4, 2, 8, count=90), AttentionSpec(0.3, window)
    out = ChunkAttention([10, 20], [50, 40])(query[60:], key, value, spec)
    torch.testing.assert_close(out, by_formula(query[60:], key, value, [10, 20], [50, 40], spec))
    assert len(kernel_by_formula) == is_varlen


def test_under_a_mask_grouped_heads_are_left_to_a_kernel_on_a_cpu_only():
    assert attention.takes_groups("cpu")
    assert not attention.takes_groups("cuda")


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_a_class_of_lengths_pads_by_at_most_an_eighth(lengths):
    classes = length_classes(lengths)
    assert sorted(index for members in classes for index in members) == [*range(len(lengths))]
    for members in classes:
        sizes = [lengths[index] for index in members]
        assert sizes[0] == max(sizes)
        assert min(sizes) >= sizes[0] - max(8, sizes[0] // 8)
