"""The Triton kernels against plain attention; without a GPU, `TRITON_INTERPRET=1` runs them in Triton's interpreter."""

import os
from importlib.util import find_spec

import pytest
import torch

from headrace.trainer.policy.attention import AttentionSpec, masked_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


@pytest.fixture
def paged_decode():
    from headrace.rollout.engine.attention_triton import paged_decode

    return paged_decode


def a_cache(lengths, page, heads, kv_heads, dim):
    """Random queries, a shuffled paged cache, its table, and the keys and values gathered."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-n // page) for n in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    shape = (sum(counts) + 1, kv_heads, page, dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(len(lengths), heads, dim, generator=generator)
    gathered = [x[table.long()].transpose(1, 2).flatten(2, 3) for x in (keys, values)]
    return query, keys, values, table, torch.tensor(lengths, dtype=torch.int32), gathered


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 24)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_paged_decode_is_attention_over_the_pages_of_each_row(paged_decode, heads, kv_heads, dim, window, softcap):
    lengths = [1, 33, 64, 600, 1030]
    query, keys, values, table, sizes, (all_keys, all_values) = a_cache(lengths, 64, heads, kv_heads, dim)
    age = sizes[:, None] - 1 - torch.arange(all_keys.shape[2])[None, :]
    sees = (age >= 0) & (age < (window or 10**6))
    rule = AttentionSpec(0.3, window, softcap)
    expected = masked_attention(query[:, :, None], all_keys, all_values, sees[:, None, None, :], rule)[:, :, 0]
    found = paged_decode(*on_device(query, keys, values, table, sizes), 0.3, window, softcap)
    assert (found.cpu() - expected).abs().max() < 1e-5


def test_a_row_has_the_same_bits_alone_and_in_the_batch(paged_decode):
    query, keys, values, table, sizes, _ = a_cache([1, 33, 64, 600], 64, 4, 2, 16)
    together = paged_decode(*on_device(query, keys, values, table, sizes), 0.3)
    for row in range(4):
        one = slice(row, row + 1)
        alone = paged_decode(*on_device(query[one], keys, values, table[one], sizes[one]), 0.3)
        assert torch.equal(alone[0], together[row])


def test_a_sink_takes_its_share_of_every_row(paged_decode):
    query, keys, values, table, sizes, (all_keys, all_values) = a_cache([1, 33, 600], 64, 4, 2, 16)
    sees = torch.arange(all_keys.shape[2])[None, :] < sizes[:, None]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0])
    rule = AttentionSpec(0.3, sinks=sinks)
    expected = masked_attention(query[:, :, None], all_keys, all_values, sees[:, None, None, :], rule)[:, :, 0]
    found = paged_decode(*on_device(query, keys, values, table, sizes), 0.3, sinks=sinks.to(DEVICE))
    assert (found.cpu() - expected).abs().max() < 1e-5
