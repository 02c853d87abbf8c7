"""Sampling: counter-based random numbers, frequencies, filters, greedy rows."""

from itertools import product

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as peer

from headrace.comm.errors import SettingError
from headrace.rollout.engine import sampling
from headrace.rollout.engine.sampling import ROW, SamplingBatch, SamplingParams, sample
from headrace.rollout.engine.streams import stream_key, uniforms
from headrace.rollout.engine.to_device import to_device_together


def batch_of(params, keys):
    rows = np.array([each.row for each in params], ROW)
    return SamplingBatch.of(rows, torch.tensor(keys), to_device_together(SamplingBatch.columns(rows), "cpu"))


def drawn(logits, params, count):
    """Relative frequencies of `count` draws."""
    keys = [stream_key(3, i) for i in range(count)]
    rows = batch_of([params] * count, keys)
    tokens, logprobs = sample(logits.repeat(count, 1), rows, torch.zeros(count, dtype=torch.long))
    return torch.bincount(tokens, minlength=logits.numel()) / count, tokens, logprobs


def test_numbers_are_uniform_and_differ_between_streams_and_positions():
    keys = torch.tensor([stream_key(0, i) for i in range(200)])
    numbers = torch.stack([uniforms(keys, torch.full((200,), t)) for t in range(200)])
    assert numbers.min() > 0 and numbers.max() < 1
    histogram = torch.histc(numbers, 20, 0, 1) / numbers.numel()
    assert (histogram - 0.05).abs().max() < 0.005
    assert numbers.unique().numel() > 39_000
    for axis in (0, 1):
        left, right = numbers.narrow(axis, 0, 199).flatten(), numbers.narrow(axis, 1, 199).flatten()
        assert torch.corrcoef(torch.stack((left, right)))[0, 1].abs() < 0.02


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    frequencies, tokens, logprobs = drawn(logits, SamplingParams(temperature=2), 20_000)
    expected = (logits / 2).softmax(0)
    assert (frequencies - expected).abs().max() < 0.01
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_top_k_top_p_and_min_p_drop_the_unlikely_and_renormalise():
    logits = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log()
    kept = {
        SamplingParams(top_k=2): 2,
        SamplingParams(top_p=0.85): 3,
        SamplingParams(min_p=0.1): 4,
        SamplingParams(top_k=4, top_p=0.2): 1,
    }
    for params, count in kept.items():
        frequencies, tokens, logprobs = drawn(logits, params, 4_000)
        expected = logits[:count].softmax(0)
        assert (frequencies[count:] == 0).all()
        assert (frequencies[:count] - expected).abs().max() < 0.03
        assert torch.allclose(logprobs, logits.log_softmax(0)[tokens], atol=1e-6)


def test_filters_and_penalties_are_those_of_transformers():
    params = [
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
        for top_k, top_p, min_p, penalty in product((0, 7, 300, 1000), (1.0, 0.3, 0.95), (0.0, 0.02), (1.0, 0.7, 1.4))
    ]
    numbers = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(params), 600, generator=numbers)
    tokens = torch.randint(0, 600, (len(params), 90), generator=numbers)
    rows = batch_of(params, range(len(params)))
    rows.record_tokens(None, tokens.tolist(), vocab_size=600)
    found = sampling._filtered(sampling._penalized(logits, rows), rows)
    for row, own in enumerate(params):
        processors = LogitsProcessorList([peer.RepetitionPenaltyLogitsProcessor(own.repetition_penalty)])
        processors += [peer.TopKLogitsWarper(own.top_k)] if own.top_k else []
        processors += [peer.TopPLogitsWarper(own.top_p), peer.MinPLogitsWarper(own.min_p)]
        expected = processors(tokens[row : row + 1], logits[row : row + 1])[0]  # pyright: ignore[reportArgumentType]
        assert torch.equal(found[row], expected), own


def test_top_p_keeps_no_token_beyond_those_that_reach_it_exactly():
    for top_p, count in ((0.25, 1), (0.5, 2), (0.75, 3)):
        frequencies, _, _ = drawn(torch.zeros(4), SamplingParams(top_p=top_p), 500)
        assert int((frequencies > 0).sum()) == count, top_p


def test_a_repetition_penalty_makes_seen_tokens_of_either_sign_less_likely():
    logits, count = torch.tensor([-2.0, 2.0, 0.5]), 5_000
    rows = batch_of([SamplingParams(repetition_penalty=2)] * count, [stream_key(3, i) for i in range(count)])
    rows.record_tokens(None, [range(3)] * count, vocab_size=3)
    tokens, _ = sample(logits.repeat(count, 1), rows, torch.zeros(count, dtype=torch.long))
    expected = torch.tensor([-4.0, 1.0, 0.25]).softmax(0)
    assert (torch.bincount(tokens, minlength=3) / count - expected).abs().max() < 0.02


def test_a_drawn_token_is_penalized_from_the_next_step_on():
    rows = batch_of([SamplingParams(temperature=0, repetition_penalty=4)], [1])
    rows.record_tokens(None, [[2]], vocab_size=3)
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    assert [int(sample(logits.clone(), rows, torch.tensor([step])).tokens) for step in range(3)] == [0, 1, 0]


def test_the_log_probability_is_the_policys_at_the_temperature_whatever_changes_the_draw():
    """A greedy row counts as temperature 1, as in the trainer."""
    logits = torch.randn(5, 50)
    params = [
        SamplingParams(temperature=0.5, top_p=0.3),
        SamplingParams(temperature=2, repetition_penalty=1.7),
        SamplingParams(temperature=0, repetition_penalty=1.7),
        SamplingParams(temperature=0, top_k=3),
        SamplingParams(),
    ]
    rows = batch_of(params, [1, 2, 3, 4, 5])
    rows.record_tokens(None, [range(25)] * 5, vocab_size=50)
    tokens, logprobs = sample(logits.clone(), rows, torch.zeros(5, dtype=torch.long))
    scales = torch.tensor([2, 0.5, 1, 1, 1])[:, None]
    expected = (logits * scales).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(logprobs, expected)
    penalized = torch.where(logits[2] > 0, logits[2] / 1.7, logits[2] * 1.7)
    assert tokens[2] == torch.where(torch.arange(50) < 25, penalized, logits[2]).argmax()


def test_greedy_and_random_rows_share_a_batch():
    logits = torch.randn(4, 50)
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3), SamplingParams(temperature=0)]
    rows = batch_of(params, [1, 2, 3, 4])
    tokens, logprobs = sample(logits.clone(), rows, torch.zeros(4, dtype=torch.long))
    assert tokens[0] == logits[0].argmax() and tokens[3] == logits[3].argmax()
    assert torch.allclose(logprobs[0], logits[0].log_softmax(0)[tokens[0]])


def test_a_row_without_top_p_keeps_its_least_likely_tokens_beside_one_with_it():
    logits = 2 * torch.randn(8, 32_000, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(min_p=1e-9)] * 3 + [SamplingParams(top_p=0.5)] * 2
    is_kept = sampling._filtered(logits, batch_of(params, range(8))).isfinite()
    assert is_kept[:6].all() and not is_kept[6:].all(1).any()


@pytest.mark.parametrize(
    ("params", "is_plain"),
    [({}, True), ({"temperature": 0.0, "top_k": 5}, True), ({"min_p": 0.1}, False), ({"top_p": 0.9}, False),
     ({"repetition_penalty": 1.1}, False), ({"temperature": 0.0, "repetition_penalty": 1.1}, False)],
)  # fmt: skip
def test_plain_rows_have_neither_a_filter_nor_a_penalty_and_a_batch_of_them_has_no_filters(params, is_plain):
    assert SamplingParams(**params).is_plain == is_plain
    assert (batch_of([SamplingParams(**params)], [1]).filters is None) == is_plain


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, 500:520] = 0
    _, tokens, _ = drawn(logits, SamplingParams(), 5_000)
    assert tokens.min() == 500 and tokens.max() == 519


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_not_finite_spoils_no_other_row(wrong, temperature):
    torch.manual_seed(0)
    logits, params, keys = torch.randn(3, 50), SamplingParams(temperature=temperature), [1, 2, 3]
    expected = sample(logits.clone(), batch_of([params] * 3, keys), torch.zeros(3, dtype=torch.long))
    logits[1] = wrong
    found = sample(logits, batch_of([params] * 3, keys), torch.zeros(3, dtype=torch.long))
    assert found.logprobs.isnan().tolist() == [False, True, False]
    assert found.tokens[1] < 50
    for row in (0, 2):
        assert (found.tokens[row], found.logprobs[row]) == (expected.tokens[row], expected.logprobs[row])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 2.5),
        ("n", 1.5),
        ("top_k", 0.5),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", 1e-40),
        ("repetition_penalty", float("inf")),
        ("stop", ""),
        ("stop", b"x"),
        ("stop", ("a", "")),
        ("stop", (2.0,)),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_refused_by_name(name, value):
    with pytest.raises(SettingError, match=rf"sampling\.{name} must be"):
        SamplingParams(**{name: value})
