"""Exact mode by the kernels of a GPU: generator and trainer agree bit for bit; without a GPU in Triton's interpreter."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.exact import packed_logprobs, run, use_kernels
from support.fake_cuda import fake_captures
from support.interpreter import DEVICE, let_loops_take_tensors, needs_triton
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
    let_loops_take_tensors(monkeypatch)
    monkeypatch.setattr(exact_check, "NUM_NEW_TOKENS", 2)
    monkeypatch.setattr(exact_check, "LENGTHS", (3,))
    if DEVICE == "cpu":
        use_kernels(monkeypatch)
        fake_captures(monkeypatch)


def assert_same_bits(path, dtype, completions, temperature=1.0):
    policy = load_policy(path, dtype, DEVICE, exact=True)
    found = torch.tensor([x for c in completions for x in c.logprobs])
    assert torch.equal(found, packed_logprobs(policy, completions, temperature))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "phi3"])
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


def test_generator_and_trainer_launch_the_same_compiled_kernels(tmp_path, monkeypatch):
    """Triton compiles by types, tile sizes, warps, and the values of all arguments but those in `do_not_specialize`."""
    from triton.runtime.jit import KernelInterface  # pyright: ignore[reportMissingImports]

    keys: dict[str, set[str]] = defaultdict(set)

    def recorded(self, grid):
        general = {"table_stride", "num_keys", "num_splits", "rows"}

        def launch(*args, **kwargs):
            named = dict(zip(self.arg_names, args, strict=False))
            of_args = [
                (name, str(x.dtype) if isinstance(x, torch.Tensor) else x)
                for name, x in named.items()
                if name not in general
            ]
            keys[self.__name__].add(str((of_args, sorted(kwargs.items()))))
            return self.run(*args, grid=grid, warmup=False, **kwargs)

        return launch

    monkeypatch.setattr(KernelInterface, "__getitem__", recorded)
    path = tiny_policy(tmp_path, "qwen3", **TINY)
    engine = Engine(path, "float16", 2, exact=True, prefill_tokens=50)
    completions = run(engine, [[5, 6], [7] * 66], SamplingParams(max_new_tokens=2, ignore_eos=True))
    generator = dict(keys)
    keys.clear()
    assert_same_bits(path, "float16", completions)
    assert dict(keys) == generator
    assert set(generator) == {
        "_linear_kernel",
        "_norm_kernel",
        "_tile_kernel",
        "_merge_kernel",
        "_normalizer_kernel",
        "_gate_kernel",
    }


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
