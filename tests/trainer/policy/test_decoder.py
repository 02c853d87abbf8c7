"""The generator's lean forward pass."""

import torch
from support.policies import tiny_policy

from headrace.trainer.policy.decoder import HeadRule, LeanDecoder
from headrace.trainer.policy.model import load_policy


def test_a_bfloat16_policy_rotates_by_angles_that_are_not_rounded_to_bfloat16(tmp_path):
    decoder = LeanDecoder(load_policy(tiny_policy(tmp_path), "bfloat16"))
    positions = torch.arange(250)
    cos, sin = decoder._cos.index_select(0, positions), decoder._sin.index_select(0, positions)
    heads = torch.randn(250, 8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = positions.double()[:, None] / 10_000.0 ** (torch.arange(8).double() / 8)
    rotation = torch.polar(torch.ones(()).double(), angles)[:, None]
    first, second = heads.double()[:, :6].chunk(2, -1)
    rotated = torch.complex(first, second) * rotation
    expected = torch.cat((rotated.real, rotated.imag), -1)
    query, key, value = decoder._split(heads.clone(), HeadRule(cos, sin, None, None, 1e-6))
    error = (torch.cat((query, key), 1).double() - expected).abs()
    assert (error <= expected.abs() * 2**-8 + 1e-5).all(), "more than one rounding"
    assert torch.equal(value, heads[:, 6:])
