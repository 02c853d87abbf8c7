"""A prefix tree has each shared token once, and a policy over it computes what it computes for each row alone."""

from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.float64 import in_float64
from support.policies import FAMILIES, LONGROPE, tiny_policy
from torch import Tensor

from headrace.trainer.batch import Trajectory, pack
from headrace.trainer.logprobs import packed_hidden
from headrace.trainer.policy import tree_attention
from headrace.trainer.policy.attention import AttentionSpec, PackedAttention
from headrace.trainer.policy.model import Policy, load_policy
from headrace.trainer.policy.prefix_tree import PrefixTree

PIECES = st.lists(st.integers(0, 2), max_size=6)


@st.composite
def tries(draw: Any) -> list[np.ndarray]:
    """Rows of few different tokens, many of which continue a part of another row."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        first = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        row = first[: draw(st.integers(0, len(first)))] + draw(PIECES)
        rows.append(row or [0])
    return [np.array(row, np.int32) for row in rows]


def branching(depth: int, seed: int = 0, length: int = 13) -> list[np.ndarray]:
    """Rows of `depth` turns, of which each has two continuations."""
    rng = np.random.default_rng(seed)
    rows = [np.zeros(0, np.int32)]
    for _ in range(depth):
        rows = [np.concatenate([row, rng.integers(4, 99, rng.integers(1, length))]) for row in rows for _ in range(2)]
        rows = [np.concatenate([rng.integers(4, 99, 40), row]) for row in rows[:1]] + rows[1:] if depth > 5 else rows
    prompt = rng.integers(4, 99, 30)
    return [np.concatenate([prompt, row]).astype(np.int32) for row in rows]


def group(prompt: int, lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(4, 99, prompt)
    return [np.concatenate([shared, rng.integers(4, 99, n)]).astype(np.int32) for n in lengths]


@given(rows=tries(), shortest=st.integers(1, 4))
def test_a_tree_has_every_row_in_it_and_with_branches_of_any_length_each_prefix_once(
    rows: list[np.ndarray], shortest: int
):
    tree = PrefixTree.of(rows, shortest)
    parts = np.split(tree.row_nodes, np.cumsum(tree.lengths)[:-1])
    for row, nodes in zip(rows, parts, strict=True):
        assert (tree.token_ids[nodes] == row).all() and (tree.positions[nodes] == np.arange(len(row))).all()
    if shortest == 1:
        assert len(tree.token_ids) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    assert sorted(branch.row for branch in tree.branches) == list(range(len(rows)))
    seen = np.zeros((len(tree.token_ids),) * 2, int)
    for stem in tree.stems:
        seen[stem.queries, stem.keys] += 1
    for branch in tree.branches:
        own = slice(branch.start, branch.stop)
        seen[own, own] += np.tri(branch.stop - branch.start, dtype=int)
        path = tree.path(branch)
        assert (seen[own].sum(1) == tree.positions[own] + 1).all() and (seen[own][:, path] <= 1).all()


SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=7),
    "wide window": AttentionSpec(0.3, window=10_000),
    "softcap": AttentionSpec(0.3, softcap=2.0),
    "sinks": AttentionSpec(0.3, window=20, sinks=torch.linspace(-2, 2, 4)),
}


@pytest.mark.parametrize("spec", SPECS)
@given(rows=tries(), seed=st.integers(0, 9))
def test_attention_over_a_tree_is_that_of_each_row_alone(spec: str, rows: list[np.ndarray], seed: int):
    check_attention(PrefixTree.of(rows, 1), SPECS[spec], seed, torch.float64, 1e-12)


@pytest.mark.parametrize("lengths", [[100, 90, 17], [300, 120, 64, 63]])
def test_attention_in_bfloat16_is_that_of_each_row_alone_within_rounding(lengths: list[int]):
    for prompt in (20, 140):
        check_attention(PrefixTree.of(group(prompt, lengths)), AttentionSpec(0.3), 0, torch.bfloat16, 0.03)


@pytest.mark.parametrize("size", [8, 64])
def test_keys_that_a_group_shares_have_a_gradient_in_bfloat16_that_is_rounded_once(size: int):
    tree = PrefixTree.of(group(5, [3] * size))
    check_attention(tree, SPECS["window"], 0, torch.bfloat16, 0.03)
    x = torch.randn(5, 2, 8).bfloat16().requires_grad_()
    grad = torch.randn(5 * size, 2, 8).bfloat16()
    tree_attention._rows(x, torch.arange(5).repeat(size)).backward(grad)
    exact = grad.double().unflatten(0, (size, 5)).sum(0)
    assert x.grad is not None
    error = (x.grad.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.0025, "of a single rounding it is about 0.0017"


def check_attention(tree: PrefixTree, spec: AttentionSpec, seed: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(seed)
    is_double = dtype == torch.float64
    num = len(tree.token_ids)
    tensors = [torch.randn(num, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
    nodes = torch.from_numpy(tree.row_nodes)
    grad = torch.randn(len(nodes), 4, 8, dtype=dtype)
    found: list[list[Tensor]] = []
    for is_tree in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        with in_float64() if is_double else nullcontext():
            if is_tree:
                out = tree_attention.TreeAttention(tree)(0, q, k, v, spec)[nodes]
            else:
                out = PackedAttention(tree.lengths)(0, q[nodes], k[nodes], v[nodes], spec)
            (out * grad).sum().backward()
        found.append([out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)])
    for ours, alone in zip(*found, strict=True):
        assert (ours - alone).abs().max() <= bound * alone.abs().max().clamp(min=1)


def logprobs_and_gradients(policy: Policy, tree: PrefixTree, *, is_tree: bool) -> list[Tensor]:
    """Log-probs and entropies of all tokens but the first of each row, and the gradients of their weighted sum."""
    policy.zero_grad()
    token_ids = torch.from_numpy(tree.token_ids[tree.row_nodes]).long()
    starts = [0, *accumulate(tree.lengths)]
    predictors = torch.cat([torch.arange(a, b - 1) for a, b in pairwise(starts)])
    if is_tree:
        hidden = policy.forward_tree(tree, policy.device)[torch.from_numpy(tree.row_nodes)[predictors]]
    else:
        hidden = policy.forward_packed(token_ids, torch.tensor(starts))[predictors]
    logprobs, entropy = policy.token_logprobs(hidden, token_ids[predictors + 1])
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    (logprobs * weights + 0.1 * entropy).sum().backward()
    gradients = [weight.grad for weight in policy.weights().values() if weight.grad is not None]
    return [logprobs.detach(), entropy.detach(), *(gradient.clone() for gradient in gradients)]


def check_policy(policy: Policy, rows: list[np.ndarray], shortest: int, bound: float) -> None:
    tree = PrefixTree.of(rows, shortest)
    assert tree.ratio > 1.2
    ours, alone = (logprobs_and_gradients(policy, tree, is_tree=is_tree) for is_tree in (True, False))
    for one, other in zip(ours, alone, strict=True):
        assert (one - other).abs().max() <= bound * other.abs().max().clamp(min=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_log_probs_and_gradients_of_rows_alone(tmp_path, family):
    policy = load_policy(tiny_policy(tmp_path, family))
    check_policy(policy, group(40, [25, 3, 30, 28]), 4, 2e-5)
    with in_float64(policy):
        check_policy(policy, group(40, [25, 3, 30, 28]), 4, 1e-10)
        check_policy(policy, branching(3), 1, 1e-10)


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_5_text"])
def test_turns_that_branch_at_every_depth_have_the_log_probs_of_rows_alone(tmp_path, family, depth):
    policy = load_policy(tiny_policy(tmp_path, family))
    with in_float64(policy):
        check_policy(policy, branching(depth, seed=depth), 1, 1e-10)


def test_activation_checkpointing_changes_nothing(tmp_path):
    path = tiny_policy(tmp_path)
    plain, checkpointed = load_policy(path), load_policy(path)
    checkpointed.checkpoint_activations()
    tree = PrefixTree.of(branching(3))
    for one, other in zip(*(logprobs_and_gradients(p, tree, is_tree=True) for p in (plain, checkpointed)), strict=True):
        assert torch.equal(one, other)


def test_exact_mode_and_long_rows_of_longrope_have_no_tree(tmp_path):
    policy = load_policy(tiny_policy(tmp_path))
    assert policy.longest_in_tree == policy.context
    policy.make_exact()
    assert policy.longest_in_tree == 0
    assert load_policy(tiny_policy(tmp_path, "phi3", **LONGROPE)).longest_in_tree == 64


def test_a_tree_is_computed_where_the_batch_is_though_the_weights_are_offloaded(tmp_path, monkeypatch):
    policy = load_policy(tiny_policy(tmp_path))
    monkeypatch.setattr(Policy, "device", torch.device("meta"))  # as the CPU beside a GPU
    tree = PrefixTree.of(group(20, [5, 6]))
    assert policy.forward_tree(tree, torch.device("cpu")).device.type == "cpu"
    # `packed_hidden` takes the device of its batch.
    trajectories = [
        Trajectory(row[:20], row[20:], zeros, zeros, 0, advantages=zeros)
        for row in group(20, [5, 6])
        for zeros in [np.zeros(len(row) - 20, np.float32)]
    ]
    batch = pack(trajectories, 0, torch.device("cpu"), longest_in_tree=100)
    assert batch.tree is not None and packed_hidden(policy, batch, "float32").device.type == "cpu"
