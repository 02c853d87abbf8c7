"""The kernels of exact mode: their formulas in float64, and rows that depend on no other row; without a GPU in Triton's interpreter."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.exact import use_kernels
from support.interpreter import DEVICE, mend_interpreter, needs_triton
from support.policies import random_prompts, tiny_policy

from headrace.trainer.policy.attention import AttentionSpec, band, masked_attention
from headrace.trainer.policy.exact.operators import PAGE, Run
from headrace.trainer.policy.model import load_policy

pytestmark = [pytest.mark.extra, needs_triton]
GENERATE = [Phase.generate]
"""Without the phase that explains a failure: it traces every line that the interpreter executes."""
KINDS = [(torch.float32, 2e-6), (torch.float16, 2e-3)] + ([(torch.bfloat16, 2e-2)] if DEVICE == "cuda" else [])
"""Types, and the largest relative error of a result in each."""


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    mend_interpreter(monkeypatch)


def numbers(*shape: int, kind: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, kind)


def is_near(found, expected, kind, error):
    assert found.dtype == kind
    return ((found - expected).abs() <= error * (1 + expected.abs())).all()


@pytest.mark.parametrize(("kind", "error"), KINDS)
@pytest.mark.parametrize(("rows", "inputs", "columns"), [(1, 16, 8), (70, 100, 130), (200, 64, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_is_the_product_and_the_bias(kind, error, rows, inputs, columns, has_bias):
    from headrace.trainer.policy.kernels.exact_linear import exact_linear

    x, weight = numbers(rows, inputs, kind=kind) / inputs**0.5, numbers(columns, inputs, kind=kind, seed=1)
    bias = numbers(columns, kind=kind, seed=2) if has_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert is_near(exact_linear(x, weight, bias), expected, kind, error)
    wide = exact_linear(x, weight, bias, torch.empty(rows, columns, device=DEVICE))
    assert is_near(wide, expected, torch.float32, 2e-6 if kind == torch.float32 else 2e-5)


@pytest.mark.parametrize(("kind", "error"), KINDS)
@pytest.mark.parametrize("size", [16, 100, 1500])
def test_a_norm_is_the_row_over_its_root_mean_square(kind, error, size):
    from headrace.trainer.policy.kernels.exact_rows import exact_rms_norm

    x, weight = 3 * numbers(4, 3, size, kind=kind), numbers(size, kind=kind, seed=1)
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert is_near(exact_rms_norm(x, weight, 1e-5), expected, kind, error)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("vocab", [128, 4096, 9001])
def test_log_softmax_is_the_formula_and_a_row_that_is_not_finite_spoils_no_other_one(vocab):
    from headrace.trainer.policy.kernels.exact_rows import exact_log_softmax

    logits = 5 * numbers(7, vocab)
    logits[4, :100] = float("-inf")
    expected = logits.double().log_softmax(-1)
    logits[1, 3], logits[3, 5], logits[5] = float("nan"), float("inf"), float("-inf")
    found = exact_log_softmax(logits)
    assert found[[1, 3, 5]].isnan().all()
    assert torch.equal(found[4, :100], expected[4, :100].float())
    assert ((found - expected)[[0, 2, 6]].abs() <= 2e-6 * (1 + expected[[0, 2, 6]].abs())).all()


Both = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


def a_cache(lengths, kv_heads, dim, kind) -> tuple[list[Run], Both, Both]:
    """Runs of whole sequences with shuffled pages, whose unused places are NaN, and their keys and values one after the other."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    runs = [Run(0, length, [order.pop() for _ in range(count)]) for length, count in zip(lengths, counts, strict=True)]
    packed, paged = [], []
    for seed in (1, 2):
        x = numbers(sum(lengths), kv_heads, dim, kind=kind, seed=seed)
        pages = torch.full((sum(counts), kv_heads, PAGE, dim), float("nan"), dtype=kind, device=DEVICE)
        for run, part in zip(runs, x.split(lengths), strict=True):
            for position in range(run.stop):
                pages[run.pages[position // PAGE], :, position % PAGE] = part[position]
        packed.append(x)
        paged.append(pages)
    return runs, (packed[0], packed[1]), (paged[0], paged[1])


@pytest.mark.parametrize(("kind", "error"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 24), pytest.param(2, 2, 16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_pages_is_attention_over_each_sequence(kind, error, heads, kv_heads, dim, window):
    from headrace.trainer.policy.exact.kernels import KernelAttention

    lengths = [1, 64, 530]
    runs, (keys, values), pages = a_cache(lengths, kv_heads, dim, kind)
    runs = [
        Run(max(run.stop - 40, 0), run.stop, run.pages) for run in runs
    ]  # the last queries: the interpreter is slow
    query, spec = numbers(sum(lengths), heads, dim, kind=kind), AttentionSpec(0.3, window)
    expected = []
    for q, k, v in zip(*(x.double().transpose(0, 1).split(lengths, 1) for x in (query, keys, values)), strict=True):
        sees = band(q.shape[1], q.shape[1], window, q.device)
        expected.append(masked_attention(q[None], k[None], v[None], sees, spec)[0].transpose(0, 1)[-40:])
    query = torch.cat([q[-40:] for q in query.split(lengths)])
    found = KernelAttention(runs, DEVICE)(query, *pages, spec)
    assert is_near(found, torch.cat(expected), kind, error)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    chunk=st.integers(15, 70),
    kind=st.sampled_from(KINDS),
    window=st.sampled_from([None, 50]),
)
@settings(max_examples=2 if DEVICE == "cpu" else 6, phases=GENERATE)
def test_a_querys_bits_depend_neither_on_its_chunk_nor_on_its_batch(lengths, chunk, kind, window):
    from headrace.trainer.policy.exact.kernels import KernelAttention
    from headrace.trainer.policy.kernels.exact_attention import QueryTiles, exact_paged_attention

    kind, spec = kind[0], AttentionSpec(0.3, window)
    runs, _, pages = a_cache(lengths, 2, 16, kind)
    query = numbers(sum(lengths), 6, 16, kind=kind)
    whole = KernelAttention(runs, DEVICE)(query, *pages, spec)
    first = 0
    for run in runs:
        own, expected = query[first : first + run.stop], whole[first : first + run.stop]
        for start in range(0, run.stop, chunk):
            part = Run(start, min(start + chunk, run.stop), run.pages)
            assert torch.equal(
                KernelAttention([part], DEVICE)(own[part.start : part.stop], *pages, spec),
                expected[part.start : part.stop],
            )
        first += run.stop
    width = max(len(run.pages) for run in runs)
    table = torch.tensor([[*run.pages, *[0] * (width - len(run.pages))] for run in runs], dtype=torch.int32)
    newest, sizes = torch.tensor(lengths).cumsum(0) - 1, torch.tensor(lengths, dtype=torch.int32)
    tiles = QueryTiles.of_newest(table.to(DEVICE), sizes.to(DEVICE))
    decoded = exact_paged_attention(query[newest], *pages, tiles, width * PAGE, spec)
    assert torch.equal(decoded, whole[newest])


@given(rows=st.integers(1, 150), start=st.integers(0, 149), kind=st.sampled_from(KINDS))
@settings(max_examples=4, phases=GENERATE)
def test_a_rows_bits_depend_on_no_other_row(rows, start, kind):
    from headrace.trainer.policy.kernels.exact_linear import exact_linear
    from headrace.trainer.policy.kernels.exact_rows import exact_log_softmax, exact_rms_norm

    x, weight, bias = (numbers(*s, kind=kind[0], seed=len(s)) for s in ((150, 200), (90, 200), (90,)))
    part = slice(start, start + rows)
    assert torch.equal(exact_linear(x[part], weight, bias), exact_linear(x, weight, bias)[part])
    assert torch.equal(exact_rms_norm(x[part], weight[0], 1e-5), exact_rms_norm(x, weight[0], 1e-5)[part])
    assert torch.equal(exact_log_softmax(x[part].float()), exact_log_softmax(x.float())[part])


def test_operands_at_other_addresses_give_the_same_bits():
    from headrace.trainer.policy.kernels.exact_linear import exact_linear

    x, weight = numbers(5, 40), numbers(8, 40, seed=1)
    moved = torch.cat((numbers(1), weight.flatten()))[1:].view(8, 40)
    assert moved.data_ptr() % 16 != 0
    assert torch.equal(exact_linear(x, moved, None), exact_linear(x, weight, None))


def test_query_tiles_that_have_no_room_at_one_time_give_the_same_bits(monkeypatch):
    from headrace.trainer.policy.exact import kernels

    runs, _, pages = a_cache([70, 40], 1, 16, torch.float32)
    query, spec = numbers(110, 6, 16), AttentionSpec(0.3)
    whole = kernels.KernelAttention(runs, DEVICE)(query, *pages, spec)
    monkeypatch.setattr(kernels, "_PARTS_BYTES", 15_000)
    attention = kernels.KernelAttention(runs, DEVICE)
    assert torch.equal(attention(query, *pages, spec), whole)
    assert attention._launches is not None and len(attention._launches) > 2


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_of_an_exact_forward_are_those_of_the_policy_in_float64(tmp_path, family, monkeypatch):
    path = tiny_policy(tmp_path, family)
    tokens = torch.tensor([t for p in random_prompts(3, 40) for t in p])
    gradients = []
    for dtype, device in (("float64", "cpu"), ("float32", DEVICE)):
        policy = load_policy(path, dtype, device)
        if dtype == "float32":
            use_kernels(monkeypatch)
            policy.make_exact()
        own = tokens.to(device)
        hidden = policy.forward_packed(own, torch.tensor([0, 30, len(tokens)]))
        if dtype == "float32":
            logprobs, entropy = policy.token_logprobs(hidden, own)
        else:
            every = policy.head(hidden).log_softmax(-1)
            logprobs, entropy = every.gather(1, own[:, None]), -(every.exp() * every).sum(-1)
        (logprobs.sum() + entropy.sum()).backward()
        gradients.append({name: weight.grad for name, weight in policy.weights().items()})
    for name, precise in gradients[0].items():
        assert (precise - gradients[1][name].cpu()).abs().max() <= 1e-4 * precise.abs().max(), name
