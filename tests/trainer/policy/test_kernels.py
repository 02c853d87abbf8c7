"""The layer's Triton kernels against their formulas in float64; without a GPU, `TRITON_INTERPRET=1` runs them in Triton's interpreter.

In fp32 and fp16: the interpreter computes with bfloat16 as if it were its bits. The formulas are those with which
`test_cuda_graphs.py` decodes every family.
"""

import pytest
import torch
from support.fake_cuda import silu_mul as silu_mul_by_formula
from support.fake_cuda import store_heads as store_heads_by_formula
from support.interpreter import DEVICE, needs_triton

from headrace.trainer.policy.decoder import HeadRule

pytestmark = [pytest.mark.extra, needs_triton]
WIDE, HALF = (torch.float32, 2e-6), (torch.float16, 2e-3)
"""A type, and the largest relative error of a result in it."""


def numbers(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, kind)


@pytest.mark.parametrize(("columns", "kind"), [(96, WIDE), (1024, HALF), (2500, WIDE)])
def test_the_gate_is_silu_times_up(columns, kind):
    kind, error = kind
    from headrace.trainer.policy.kernels.gate import silu_mul

    gate_up = 3 * numbers(5, 2 * columns, kind=kind)
    found, expected = silu_mul(gate_up), silu_mul_by_formula(gate_up.double())
    assert found.dtype == kind
    assert ((found - expected).abs() <= error * (1 + expected.abs())).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "has_norm", "kind"),
    [
        (4, 2, 16, 16, True, WIDE), (3, 1, 24, 24, False, WIDE), (6, 2, 80, 32, True, WIDE), (2, 2, 128, 96, False, WIDE),
        (4, 2, 16, 16, True, HALF),
    ],
)  # fmt: skip
def test_heads_are_normed_rotated_and_stored_at_their_tokens_place(heads, kv_heads, dim, rotary, has_norm, kind):
    from headrace.trainer.policy.kernels.heads import store_heads

    kind, error = kind
    page, lengths = 64, torch.tensor([1, 64, 65, 130, 500], dtype=torch.int32, device=DEVICE)
    # Wider than the rows need, as the view of a graph's table is; the last row is beyond it.
    table = torch.randperm(20)[:15].view(5, 3).int().to(DEVICE)
    qkv = numbers(5, heads + 2 * kv_heads, dim, kind=kind)
    cos, sin = (numbers(5, 1, rotary + i, kind=kind)[..., :rotary].contiguous() for i in range(2))
    norms = (numbers(dim, kind=kind), numbers(dim + 1, kind=kind)[:dim].contiguous()) if has_norm else (None, None)
    rule = HeadRule(cos, sin, *norms, 1e-6)
    cache = [numbers(20, kv_heads, page, dim, kind=kind) + i for i in range(2)]
    expected_cache = [tensor.double() for tensor in cache]
    precise = HeadRule(*(x if x is None else x.double() for x in rule[:4]), 1e-6)  # pyright: ignore
    expected = store_heads_by_formula(qkv.double(), precise, expected_cache, table, lengths)
    found = store_heads(qkv, rule, (cache[0], cache[1]), table, lengths)
    for ours, formula in zip((found, *cache), (expected, *expected_cache), strict=True):
        assert ours.dtype == kind
        assert ((ours - formula).abs() <= error * (1 + formula.abs())).all()
    assert found.is_contiguous()


def test_a_rows_heads_have_the_same_bits_alone_and_in_the_batch():
    from headrace.trainer.policy.kernels.heads import store_heads

    qkv, cos, sin = numbers(7, 8, 16), numbers(7, 1, 16), numbers(7, 1, 16)
    table = torch.arange(7, dtype=torch.int32, device=DEVICE)[:, None]
    lengths = torch.arange(1, 8, dtype=torch.int32, device=DEVICE)
    caches = [(torch.zeros(7, 2, 64, 16, device=DEVICE), torch.zeros(7, 2, 64, 16, device=DEVICE)) for _ in range(2)]
    norm = numbers(16)
    together = store_heads(qkv, HeadRule(cos, sin, norm, norm, 1e-6), caches[0], table, lengths)
    for row in range(7):
        one = slice(row, row + 1)
        rule = HeadRule(cos[one], sin[one], norm, norm, 1e-6)
        assert torch.equal(store_heads(qkv[one], rule, caches[1], table[one], lengths[one])[0], together[row])
    assert all(torch.equal(*each) for each in zip(*caches, strict=True))
