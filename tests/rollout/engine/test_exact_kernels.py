"""Exact mode by the kernels of a GPU: generator and trainer agree bit for bit; without a GPU in Triton's interpreter."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.exact import packed_logprobs, run, use_kernels
from support.fake_cuda import fake_captures
from support.interpreter import DEVICE, mend_interpreter, needs_triton
from support.policies import tiny_policy

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine import exact_check
from headrace.trainer.policy.model import load_policy

pytestmark = [pytest.mark.extra, needs_triton]
GENERATE = [Phase.generate]
"""Without the phase that explains a failure: it traces every line that the interpreter executes."""
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
"""The interpreter takes milliseconds for each program."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    mend_interpreter(monkeypatch)
    monkeypatch.setattr(exact_check, "NUM_NEW_TOKENS", 2)
    monkeypatch.setattr(exact_check, "LENGTHS", (3,))
    if DEVICE == "cpu":
        use_kernels(monkeypatch)
        fake_captures(monkeypatch)


def assert_same_bits(path, dtype, completions, temperature=1.0):
    policy = load_policy(path, dtype, DEVICE, exact=True)
    found = torch.tensor([x for c in completions for x in c.logprobs])
    assert torch.equal(found, packed_logprobs(policy, completions, temperature))


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral", "phi3"))]
)
@given(
    dtype=st.sampled_from(["float32", "float16"]),
    seed=st.integers(0, 99),
    lengths=st.tuples(st.integers(1, 20), st.integers(60, 80)),
    max_running=st.integers(1, 3),
    prefill_tokens=st.integers(20, 100),
)
@settings(max_examples=1 if DEVICE == "cpu" else 10, phases=GENERATE)
def test_generator_and_trainer_agree_bit_for_bit(
    tmp_path_factory, family, dtype, seed, lengths, max_running, prefill_tokens
):
    path = tiny_policy(tmp_path_factory.mktemp("policy"), family, seed, **TINY)
    engine = Engine(path, dtype, max_running, exact=True, prefill_tokens=prefill_tokens)
    params = SamplingParams(max_new_tokens=3, temperature=0.8, ignore_eos=True)
    prompts = [[4 + (seed + 7 * i) % 90 for i in range(length)] for length in lengths]
    assert_same_bits(path, dtype, run(engine, prompts, params), temperature=0.8)


Launch = tuple[Any, dict[str, Any], dict[str, Any]]
"""A kernel, its arguments by name, and those given by name alone, which are constants of the compiled kernel."""


def exempted(kernel, rule) -> set[str]:
    """Parameters of a kernel that it names in this rule; in the interpreter these are in `kwargs`."""
    return set(getattr(kernel, rule, None) or getattr(kernel, "kwargs", {}).get(rule) or ())


def specialization(x, follows_alignment) -> object:
    """What Triton compiles by besides the type of an argument."""
    number = x.data_ptr() if isinstance(x, torch.Tensor) else x
    if x is number and (isinstance(x, float) or x == 1):
        return "any" if isinstance(x, float) else "one"
    return "a multiple of 16" if follows_alignment and number % 16 == 0 else "any"


def compiled(launches: list[Launch], without=("", "")) -> dict[str, set[str]]:
    """The compiled kernels of launches, if in this kernel this parameter were not exempted."""
    keys = defaultdict(set)
    for kernel, named, constants in launches:
        unspecialized, unaligned = (exempted(kernel, "do_not_specialize" + of) for of in ("", "_on_alignment"))
        if kernel.__name__ == without[0]:
            unspecialized.discard(without[1])
        key = [
            (name, x.dtype if isinstance(x, torch.Tensor) else type(x))
            + (() if name in unspecialized else (specialization(x, name not in unaligned),))
            for name, x in named.items()
        ]
        keys[kernel.__name__].add(str((key, sorted(constants.items()))))
    return dict(keys)


def test_generator_and_trainer_launch_the_same_compiled_kernels(tmp_path, monkeypatch):
    """Triton compiles by types, constants, and of other arguments by alignment and by what it says about numbers."""
    from triton.runtime.jit import KernelInterface  # pyright: ignore[reportMissingImports]

    from headrace.trainer.policy.exact import kernels as exact_kernels
    from headrace.trainer.policy.kernels import exact_attention, merge

    for module in (exact_kernels, exact_attention, merge):
        monkeypatch.setattr(module, "SPLIT", 64)
    launches: list[Launch] = []

    def recorded(self, grid):
        def launch(*args, **constants):
            launches.append((self, dict(zip(self.arg_names, args, strict=False)), constants))
            return self.run(*args, grid=grid, warmup=False, **constants)

        return launch

    monkeypatch.setattr(KernelInterface, "__getitem__", recorded)
    path = tiny_policy(tmp_path, "qwen3", **TINY)
    engine = Engine(path, "float16", 2, exact=True, prefill_tokens=50)
    completions = run(engine, [[5, 6], [7] * 66], SamplingParams(max_new_tokens=2, ignore_eos=True))
    completions += run(engine, [[5, 6]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    draws = ("_sums_kernel", "_draw_kernel")  # the generator's alone, and on a GPU only
    generator = [launch for launch in launches if launch[0].__name__ not in draws]
    launches.clear()
    assert_same_bits(path, "float16", completions)
    found = compiled(generator)
    assert compiled(launches) == found
    assert set(found) == {
        "_linear_kernel",
        "_norm_kernel",
        "_tile_kernel",
        "_merge_kernel",
        "_normalizer_kernel",
        "_gate_kernel",
    }
    for kernel in {kernel.__name__: kernel for kernel, _, _ in generator}.values():
        for name in exempted(kernel, "do_not_specialize"):
            without = kernel.__name__, name
            assert compiled(launches, without) != compiled(generator, without), without


def test_an_engine_says_that_exact_mode_is_unproven_on_a_gpu_and_names_the_command(tmp_path, caplog):
    engine = Engine(tiny_policy(tmp_path, **TINY), exact=True)
    assert "exact mode is unproven on a GPU until `bash tests/gpu.sh`" in engine.description
    assert engine.runner._graphs is not None and "bash tests/gpu.sh" in caplog.text


def test_greedy_rows_report_the_trainers_log_probabilities(tmp_path):
    path = tiny_policy(tmp_path, **TINY)
    engine = Engine(path, "float32", 2, exact=True)
    params = [SamplingParams(max_new_tokens=3, temperature=t, top_k=5 if t else 0, ignore_eos=True) for t in (0, 1)]
    completions = engine.generate([[5, 6, 7], [8, 9]], params)
    assert_same_bits(path, "float32", completions)


def test_pages_of_another_size_and_other_attention_are_refused_by_name(tmp_path):
    path = tiny_policy(tmp_path, **TINY)
    with pytest.raises(SettingError, match=r"generator\.exact: pages have 64 tokens, not 128"):
        Engine(path, exact=True, page_size=128)
    with pytest.raises(SettingError, match=r"generator\.attention: exact mode runs on 'triton', not on 'gather'"):
        Engine(path, exact=True, attention="gather")
