"""The kernels of plain sampling against their formula in float64; without a GPU, `TRITON_INTERPRET=1` runs them in Triton's interpreter."""

import pytest
import torch
from support.interpreter import DEVICE, needs_triton

from headrace.rollout.engine.sampling import SamplingBatch, sample
from headrace.rollout.engine.streams import stream_key, uniforms

pytestmark = [pytest.mark.extra, needs_triton]
INF = float("inf")


def draw(logits, temperatures):
    """The tokens that the kernels draw, and their random numbers."""
    from headrace.rollout.engine.triton_draw import draw

    scales = torch.tensor([[1 / (t or 1)] for t in temperatures])
    is_greedy = torch.tensor([t == 0 for t in temperatures])
    keys = torch.tensor([stream_key(7, row) for row in range(len(logits))])
    positions = torch.arange(len(logits))
    found = draw(*(x.to(DEVICE) for x in (logits, scales, is_greedy, keys, positions)))
    return *(x.cpu() for x in found), uniforms(keys, positions).double()


@pytest.mark.parametrize("vocab", [128, 4096, 9001])
def test_a_token_is_the_inverse_of_the_cumulative_distribution_at_the_rows_number(vocab):
    logits = 3 * torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab))
    temperatures = [0, 0.5, 1, 2] * 6
    tokens, logprobs, numbers = draw(logits, temperatures)
    scaled = logits.double() / torch.tensor([t or 1 for t in temperatures])[:, None]
    expected = scaled.log_softmax(-1)
    assert (logprobs - expected.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-5
    after = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    before = after - expected.exp().gather(1, tokens[:, None])[:, 0]
    is_greedy = torch.tensor([t == 0 for t in temperatures])
    assert torch.equal(tokens[is_greedy], logits.argmax(-1)[is_greedy])
    assert ((before - 1e-6 <= numbers) & (numbers <= after + 1e-6))[~is_greedy].all()


def test_the_kernels_draw_what_the_operators_draw():
    logits, temperatures = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)), [0, 1, 0.7, 1] * 10
    keys = torch.tensor([stream_key(7, row) for row in range(40)])
    scale = torch.tensor([[1 / (t or 1)] for t in temperatures])
    rows = SamplingBatch(keys, scale, torch.tensor([t == 0 for t in temperatures]))
    tokens, logprobs, _ = draw(logits, temperatures)
    expected = sample(logits.clone(), rows, torch.arange(40))
    assert torch.equal(tokens, expected.tokens)
    assert (logprobs - expected.logprobs).abs().max() < 1e-5


def test_a_lone_row_has_the_bits_that_it_has_among_others():
    logits = 3 * torch.randn(24, 5000, generator=torch.Generator().manual_seed(6))
    tokens, logprobs, _ = draw(logits, [0.8] * 24)
    assert [x.tolist() for x in draw(logits[:1], [0.8])[:2]] == [[tokens[0]], [logprobs[0]]]


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((40, 5000), -INF)
    logits[:, 4000:4003] = torch.tensor([0.0, -1.0, 0.0])
    logits[20:, 4999] = 1.0
    tokens, _, _ = draw(logits, [1] * 40)
    assert set(tokens[:20].tolist()) == {4000, 4001, 4002} and {4999} < set(tokens[20:].tolist()) <= {
        4000,
        4001,
        4002,
        4999,
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("wrong", [float("nan"), INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_not_finite_has_no_log_probability_and_spoils_no_other_row(wrong, temperature):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2))
    expected, others, _ = draw(logits, [temperature] * 3)
    logits[1] = wrong
    tokens, logprobs, _ = draw(logits, [temperature] * 3)
    assert logprobs.isnan().tolist() == [False, True, False] and 0 <= tokens[1] < 5000
    for row in (0, 2):
        assert (tokens[row], logprobs[row]) == (expected[row], others[row])
    logits[1], logits[1, 4999] = 0.0, float("nan")
    assert draw(logits, [temperature] * 3)[1].isnan().tolist() == [False, True, False]
