"""The kernels of filters and repetition penalties against sorted scores in float64 and the processors of transformers.

Without a GPU, `TRITON_INTERPRET=1` runs them in Triton's interpreter.
"""

import os
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as peer

from headrace.rollout.engine.sampling import Filters
from headrace.rollout.engine.streams import stream_key, uniforms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
INF = float("inf")
SETTINGS = [
    dict(zip(("top_k", "top_p", "min_p", "penalty"), each, strict=True))
    for each in [
        *product((0, 7, 300), (1.0, 0.3, 0.95), (0.0,), (1.0,)),
        *product((0, 40), (0.999,), (0.02, 0.9), (1.4,)), (1, 1.0, 0.0, 1.0), (0, 1.0, 0.05, 1.0), (0, 1.0, 0.0, 1.4),
        (0, 1e-6, 0.0, 1.0), (0, 1 - 1e-6, 0.0, 0.7), (10**6, 1.0, 1e-30, 1.3), (2, 0.5, 0.5, 1.0),
    ]
]  # fmt: skip


def numbers(rows, vocab, seed=0):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def bits_of(is_seen):
    """Flags [B, vocab] as the kernels take them."""
    flags = np.zeros((len(is_seen), -(-is_seen.shape[1] // 32) * 32), dtype=bool)
    flags[:, : is_seen.shape[1]] = is_seen.numpy()
    return torch.from_numpy(np.packbits(flags, axis=1, bitorder="little").view(np.int32))


def inputs(logits, settings, is_seen=None, temperature=1.0) -> tuple[Any, torch.Tensor]:
    """The arguments of the kernels, and the random numbers of the rows."""
    rows, vocab = logits.shape
    keys, positions = torch.tensor([stream_key(7, row) for row in range(rows)]), torch.arange(rows)
    columns = {name: torch.tensor([[setting[name]] for setting in settings]) for name in settings[0]}
    scales = torch.full((rows, 1), 1 / (temperature or 1))
    is_greedy = torch.full((rows,), temperature == 0)
    bits = bits_of(torch.zeros(rows, vocab, dtype=torch.bool) if is_seen is None else is_seen).to(DEVICE)
    filters = Filters(*(columns[name].to(DEVICE) for name in Filters._fields))
    plain = tuple(x.to(DEVICE) for x in (logits, scales, is_greedy, keys, positions))
    return (*plain, filters, bits), uniforms(keys, positions).double()


def kept_by(scores, setting):
    """Which of one row's scores, float64 [vocab], the filters keep; equal ones are kept together."""
    values = scores.sort(descending=True).values
    if 0 < setting["top_k"] < len(values):
        values = values[values >= values[setting["top_k"] - 1]]
    probs = values.softmax(0)
    values = values[(probs.cumsum(0) - probs < setting["top_p"]) & (probs >= setting["min_p"] * probs[0])]
    return scores >= values[-1]


def penalized(logits, is_seen, settings):
    penalty = torch.tensor([[setting["penalty"]] for setting in settings], dtype=torch.float64)
    scores = logits.double()
    return torch.where(is_seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def test_the_filters_of_the_oracle_are_those_of_transformers():
    logits = numbers(len(SETTINGS), 600)
    tokens = torch.randint(0, 600, (len(SETTINGS), 90), generator=torch.Generator().manual_seed(1))
    is_seen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, tokens, True)
    for row, (setting, scores) in enumerate(zip(SETTINGS, penalized(logits, is_seen, SETTINGS), strict=True)):
        processors = LogitsProcessorList([peer.RepetitionPenaltyLogitsProcessor(setting["penalty"])])
        if setting["top_k"]:
            processors.append(peer.TopKLogitsWarper(setting["top_k"]))
        processors.append(peer.TopPLogitsWarper(setting["top_p"]))
        processors.append(peer.MinPLogitsWarper(setting["min_p"]))
        theirs = processors(tokens[row : row + 1], logits[row : row + 1].double())[0]  # pyright: ignore[reportArgumentType]
        assert torch.equal(theirs > -INF, kept_by(scores, setting)), setting


@pytest.mark.parametrize("vocab", [300, 9001])
def test_a_token_is_drawn_from_the_kept_ones_by_the_rows_number_and_counts_as_seen(vocab):
    from headrace.rollout.engine.kernels.filters import draw_filtered

    settings = SETTINGS if vocab < 1000 else SETTINGS[::3]
    logits = numbers(len(settings), vocab)
    is_seen = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.1
    given, aims = inputs(logits, settings, is_seen, temperature=0.8)
    tokens, logprobs = (x.cpu() for x in draw_filtered(*given))
    scaled = logits.double() / 0.8
    assert (logprobs - scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-5
    for row, scores in enumerate(penalized(scaled, is_seen, settings)):
        kept = kept_by(scores, settings[row])
        after = scores.masked_fill(~kept, -INF).softmax(0).cumsum(0)
        before = after - scores.masked_fill(~kept, -INF).softmax(0)
        assert kept[tokens[row]], settings[row]
        assert before[tokens[row]] - 2e-6 <= aims[row] <= after[tokens[row]] + 2e-6, settings[row]
    is_seen.scatter_(1, tokens[:, None], True)
    assert torch.equal(given[-1].cpu(), bits_of(is_seen))


@pytest.mark.parametrize("vocab", [300, 5000])
def test_the_least_score_that_is_kept_is_that_of_sorted_scores(vocab):
    """Of scores in ascending order the smallest random number draws it."""
    from headrace.rollout.engine.kernels.filters import draw_filtered

    settings = SETTINGS if vocab < 1000 else SETTINGS[1::3]
    logits = numbers(len(settings), vocab, seed=3).sort(-1).values
    given, _ = inputs(logits, settings)
    keys = torch.arange(1 << 22)
    first = uniforms(keys, torch.zeros_like(keys)).argmin()
    aim = uniforms(keys[first : first + 1], torch.zeros(1, dtype=torch.long)).item()
    given[3].fill_(int(first))
    given[4].zero_()
    tokens, _ = draw_filtered(*given)
    num_checked = 0
    for logits_of_row, setting, token in zip(logits.double(), settings, tokens.tolist(), strict=True):
        kept = kept_by(logits_of_row, setting)
        probs = logits_of_row.masked_fill(~kept, -INF).softmax(0)
        least = int(kept.int().argmax())
        assert kept[token]
        if probs[least] > 2 * aim and abs(probs[least + 1 :].sum() - setting["top_p"]) > 1e-6:
            assert token == least, setting
            num_checked += 1
    assert num_checked > 0.5 * len(settings)


def test_equal_scores_at_the_threshold_are_kept_together():
    from headrace.rollout.engine.kernels.filters import draw_filtered

    logits = torch.full((24, 200), -1.0)
    logits[:, 50:54], logits[:, 90] = 1.0, 2.0
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    given, _ = inputs(logits, [off | {"top_k": 3}] * 12 + [off | {"top_p": 0.2}] * 12)
    tokens, _ = draw_filtered(*given)
    assert {90} < set(tokens[:12].tolist()) <= {50, 51, 52, 53, 90}
    assert {90} < set(tokens[12:].tolist()) <= {50, 51, 52, 53, 90}


def test_rows_without_filters_and_greedy_rows_are_those_of_plain_sampling_bit_for_bit():
    from headrace.rollout.engine.kernels.draw import draw
    from headrace.rollout.engine.kernels.filters import draw_filtered

    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    for temperature in (0.7, 0.0):
        given, _ = inputs(numbers(6, 5000, seed=4), [off] * 6, temperature=temperature)
        for found, expected in zip(draw_filtered(*given), draw(*given[:5]), strict=True):
            assert torch.equal(found, expected)


def test_a_lone_row_has_the_bits_that_it_has_among_others():
    from headrace.rollout.engine.kernels.draw import draw
    from headrace.rollout.engine.kernels.filters import draw_filtered

    settings = [SETTINGS[i] for i in (4, 12, 10)]
    is_seen = torch.rand(3, 5000, generator=torch.Generator().manual_seed(5)) < 0.1
    given, _ = inputs(numbers(3, 5000, seed=6), settings, is_seen)
    *plain, filters, seen = given
    alone = [*(x[2:3] for x in plain), Filters(*(x[2:3] for x in filters)), seen[2:3].clone()]
    for kernel, own, others in ((draw, alone[:5], plain), (draw_filtered, alone, given)):
        tokens, logprobs = kernel(*others)
        assert [x.item() for x in kernel(*own)] == [tokens[2].item(), logprobs[2].item()]


@pytest.mark.parametrize("wrong", [float("nan"), INF, -INF])
def test_a_row_whose_logits_are_not_finite_has_no_log_probability_and_spoils_no_other_row(wrong):
    from headrace.rollout.engine.kernels.filters import draw_filtered

    settings = [{"top_k": 7, "top_p": 0.9, "min_p": 0.01, "penalty": 1.2}] * 2
    logits = numbers(2, 5000, seed=8)
    expected = draw_filtered(*inputs(logits, settings)[0])
    whole, single = logits.clone(), logits.clone()
    whole[1], single[1, 4321] = wrong, wrong
    for damaged in (whole, single) if wrong != -INF else (whole,):
        tokens, logprobs = draw_filtered(*inputs(damaged, settings)[0])
        assert logprobs.isnan().tolist() == [False, True] and 0 <= tokens[1] < 5000
        assert (tokens[0], logprobs[0]) == (expected[0][0], expected[1][0])


@pytest.mark.skipif(DEVICE == "cuda", reason="passes are counted in the interpreter")
@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 7}, {"top_k": 7, "top_p": 0.9}])
def test_a_score_that_is_not_finite_costs_no_passes(setting, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder  # pyright: ignore[reportMissingImports]

    from headrace.rollout.engine.kernels import filters

    for name, operator in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):  # of a GPU: they drop NaN
        monkeypatch.setattr(
            InterpreterBuilder, name, lambda self, x, y, operator=operator: self.binary_op(x, y, operator)
        )
    off, logits = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}, numbers(1, 300, seed=9)
    scores, num_reads = filters._scores, []
    monkeypatch.setattr(filters, "_scores", lambda *args, **options: num_reads.append(1) or scores(*args, **options))
    counts = []
    for value in (0.0, INF, float("nan")):
        logits[0, 7] = value
        num_reads.clear()
        filters.draw_filtered(*inputs(logits, [off | setting])[0])
        counts.append(len(num_reads))
    assert 3 < counts[0] < 30 and max(counts[1:]) <= counts[0]
