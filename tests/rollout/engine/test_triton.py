"""The Triton kernels against plain attention; without a GPU, `TRITON_INTERPRET=1` runs them in Triton's interpreter."""

import pytest
import torch
from support.interpreter import DEVICE, mend_interpreter, needs_triton

from headrace.trainer.policy.attention import AttentionSpec, masked_attention

pytestmark = [pytest.mark.extra, needs_triton]


@pytest.fixture
def paged_decode(monkeypatch):
    from headrace.rollout.engine.attention.triton_decode import paged_decode

    mend_interpreter(monkeypatch)
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


def test_a_wider_table_changes_no_bit(paged_decode):
    query, keys, values, table, sizes, _ = a_cache([1, 33, 64, 600], 64, 4, 2, 16)
    wide = torch.cat((table, torch.zeros(4, 30, dtype=torch.int32)), 1)
    for window in (None, 40):
        found = [paged_decode(*on_device(query, keys, values, t, sizes), 0.3, window) for t in (table, wide)]
        assert torch.equal(found[0], found[1])


def test_keys_before_the_window_are_not_read(paged_decode):
    query, keys, values, table, sizes, _ = a_cache([2000], 64, 4, 2, 16)
    expected = paged_decode(*on_device(query, keys, values, table, sizes), 0.3, 40)
    table[0, : (2000 - 40) // 64] = 10**6  # pages that do not exist
    assert torch.equal(paged_decode(*on_device(query, keys, values, table, sizes), 0.3, 40), expected)


def test_a_sink_takes_its_share_of_every_row(paged_decode):
    query, keys, values, table, sizes, (all_keys, all_values) = a_cache([1, 33, 600], 64, 4, 2, 16)
    sees = torch.arange(all_keys.shape[2])[None, :] < sizes[:, None]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0])
    rule = AttentionSpec(0.3, sinks=sinks)
    expected = masked_attention(query[:, :, None], all_keys, all_values, sees[:, None, None, :], rule)[:, :, 0]
    found = paged_decode(*on_device(query, keys, values, table, sizes), 0.3, sinks=sinks.to(DEVICE))
    assert (found.cpu() - expected).abs().max() < 1e-5
