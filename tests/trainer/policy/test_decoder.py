"""The generator's lean forward pass."""

import torch
from safetensors.torch import load_file, save_file
from support.policies import tiny_policy

from headrace.trainer.policy.attention import PackedAttention
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


def test_on_a_cpu_the_sum_of_the_layers_is_rounded_to_bfloat16_no_more_than_in_the_trainer(tmp_path):
    """Each layer adds about 1 to numbers around 100, whose neighbours in bfloat16 are .5 apart: in a sum of that type half of it is lost."""
    path = tiny_policy(tmp_path, num_hidden_layers=6, tie_word_embeddings=False)
    weights = {name: weight.bfloat16() for name, weight in load_file(path / "model.safetensors").items()}
    weights["model.embed_tokens.weight"] = 100 * weights["model.embed_tokens.weight"].sign()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(4, 99, (60,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(60)
    decoder = LeanDecoder(load_policy(path, "bfloat16"))
    trainer = load_policy(path, "float32")
    with torch.no_grad():
        found = decoder(tokens, positions, PackedAttention([60])).double()
        expected = trainer(tokens, positions, PackedAttention([60])).double()
        with torch.autocast("cpu", torch.bfloat16):
            trained = trainer(tokens, positions, PackedAttention([60])).double()
    error, trainers, size = (x.square().mean().sqrt() for x in (found - expected, trained - expected, expected))
    assert error < 1.5 * trainers + 2**-9 * size, "the decoder's own rounding is that of the last norm"
