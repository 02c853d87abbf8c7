"""The captured decode step, by graphs that stand for CUDA's: the same tokens as steps one by one."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_cuda import CapturedGraph, use_graphs, use_kernels
from support.policies import LONGROPE, random_prompts, tiny_policy

from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine import batch, cuda_graphs, runner
from headrace.rollout.engine import to_device as to_device_module
from headrace.rollout.engine.to_device import to_device
from headrace.trainer.policy.model import load_policy


@pytest.fixture(params=["llama", "mistral"])
def path(request, tmp_path):
    return tiny_policy(tmp_path, request.param, max_position_embeddings=512)


def test_captured_steps_draw_what_single_steps_draw_over_rows_and_widths_that_change(path, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_NARROWEST", 32)
    monkeypatch.setattr(cuda_graphs, "_WIDER", 2)
    prompts = random_prompts(14, longest=60)
    params = [SamplingParams(max_new_tokens=5 + 13 * (i % 6), n=2, temperature=i % 3) for i in range(14)]
    expected = [c.token_ids for c in Engine(path, max_running=11, page_size=16).generate(prompts, params)]
    engine = Engine(path, max_running=11, page_size=16)
    decode, cuda = use_graphs(engine, monkeypatch)
    assert [c.token_ids for c in engine.generate(prompts, params)] == expected
    graphs = decode._graphs
    assert {width for _, width, _ in graphs} == {4, 8}, (
        "not 16 and 32: a step takes the narrowest that holds its longest row"
    )
    assert len(cuda.captures) == len(graphs)
    assert all(options == {"pool": "pool", "capture_error_mode": "thread_local"} for options in cuda.captures)
    engine.check()


def test_a_step_that_is_captured_at_the_start_of_a_page_leaves_the_pages_before_it_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_NARROWEST", 32)
    monkeypatch.setattr(cuda_graphs, "_WIDER", 2)
    path, params = tiny_policy(tmp_path), SamplingParams(max_new_tokens=20, temperature=0)
    prompts = [random_prompts(1, 1)[0] * length for length in (30, 31, 32)]
    expected = Engine(path, page_size=16).generate(prompts, params)
    engine = Engine(path, page_size=16)
    use_graphs(engine, monkeypatch)
    for done, plain in zip(engine.generate(prompts, params), expected, strict=True):
        assert done.token_ids == plain.token_ids
        assert done.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


def test_a_launch_is_as_wide_as_the_rows_and_not_as_the_context(tmp_path, monkeypatch):
    path = tiny_policy(tmp_path, max_position_embeddings=100_000)
    engine = Engine(path, max_running=4, kv_gb=0.2)
    decode, _ = use_graphs(engine, monkeypatch)
    assert decode._widths == [16, 64, 256, 1024, 1563]
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3))
    assert [*decode._graphs] == [(1, 16, True)]


def test_values_for_a_gpu_are_pinned_and_do_not_wait_for_its_steps(monkeypatch):
    pinned = SimpleNamespace(to=lambda *args, **options: (args, options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    assert to_device(np.arange(3), "cuda") == (("cuda",), {"non_blocking": True})
    assert to_device(np.arange(3), "cpu").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_attention_heads": 6, "hidden_size": 96}),
        ("mistral", {"num_key_value_heads": 1}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("phi3", LONGROPE),
    ],
)
def test_the_kernels_of_a_gpu_compute_what_the_operators_compute_in_every_family(
    tmp_path, monkeypatch, family, changes
):
    path = tiny_policy(tmp_path, family, **changes)
    prompts, params = random_prompts(6, longest=90), SamplingParams(max_new_tokens=40, n=2, temperature=0.7)
    expected = Engine(path, max_running=8).generate(prompts, params)
    engine = Engine(path, max_running=8)
    use_graphs(engine, monkeypatch)
    launches = use_kernels(engine, monkeypatch)
    found = engine.generate(prompts, params)
    assert "store_heads" in launches.names and "silu_mul" in launches.names
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    logprobs, others = (torch.tensor([x for c in each for x in c.logprobs]) for each in (found, expected))
    assert (logprobs - others).abs().max() < 1e-4


def test_rows_that_change_are_one_copy_to_the_device_and_a_steady_step_is_none(tmp_path, monkeypatch):
    engine = Engine(tiny_policy(tmp_path), max_running=4)
    use_graphs(engine, monkeypatch)
    launches = use_kernels(engine, monkeypatch)
    monkeypatch.setattr(CapturedGraph, "replay", launches.one(CapturedGraph.replay, "replay"))
    copies = []
    for module, name in ((batch, "to_device_together"), (batch, "to_device"), (cuda_graphs, "to_device")):
        copy = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, copy=copy: copies.append(args) or copy(*args))
    engine.add_group([5], SamplingParams(max_new_tokens=30, ignore_eos=True), range(3))
    engine.step()  # the capture
    for changes, num_copies in ((False, 0), (True, 1)):
        if changes:
            engine.cancel(2)
        launches.names.clear()
        copies.clear()
        with launches:
            engine.step()
        assert len(copies) == num_copies
        assert changes or launches.names == ["replay", "clone", "clone", "add_"]


def test_arrays_that_travel_together_arrive_as_they_were(monkeypatch):
    arrays = {
        "numbers": np.arange(7), "flags": np.array([True, False, True]), "none": np.zeros((0, 3), np.float32),
        "table": np.arange(15, dtype=np.int32).reshape(3, 5), "scales": np.full((3, 1), 0.7, np.float32),
    }  # fmt: skip
    copies = []
    monkeypatch.setattr(to_device_module, "to_device", lambda x, device: copies.append(device) or torch.from_numpy(x))
    found = to_device_module.to_device_together(arrays, "cuda")
    assert copies == ["cuda"]
    for name, array in arrays.items():
        assert found[name].dtype == torch.from_numpy(array).dtype and np.array_equal(found[name].numpy(), array), name


def launches_of_a_step(path, monkeypatch) -> Counter[str]:
    engine = Engine(path, max_running=4)
    graphs, _ = use_graphs(engine, monkeypatch)
    launches = use_kernels(engine, monkeypatch)
    engine.add_group([5, 6, 7], SamplingParams(max_new_tokens=50), range(4))
    for _ in range(3):
        engine.step()
    launches.names.clear()
    with torch.no_grad(), launches:
        graphs._step(4, 1, True)
    return Counter(launches.names)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_that_decodes_is_ten_launches_and_the_rest_of_a_step_thirteen(tmp_path, monkeypatch, family):
    two, three = (
        launches_of_a_step(tiny_policy(tmp_path / str(n), family, num_hidden_layers=n), monkeypatch) for n in (2, 3)
    )
    layer = three - two
    assert layer == {
        "rms_norm": 2, "mm": 2, "addmm_": 2, "store_heads": 1, "split": 1, "merge": 1, "silu_mul": 1
    }  # fmt: skip
    assert (two - layer - layer).total() <= 13


MIXED = [
    {}, {"top_k": 5}, {"temperature": 0.0, "repetition_penalty": 1.6}, {"top_p": 0.7, "temperature": 0.8}, {"min_p": 0.1},
    {"repetition_penalty": 1.3}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8}, {"temperature": 0.0},
]  # fmt: skip


def test_batches_with_filters_or_penalties_draw_beside_the_graphs_and_plain_ones_in_them(path, monkeypatch):
    """Rows with and without them come and go, lose their pages and continue, and change places."""
    prompts = random_prompts(16, longest=60)
    kinds = [*MIXED, *MIXED[1:5], {}, {}, {}, {}]
    params = [SamplingParams(max_new_tokens=5 + 20 * (i % 5), n=2, **kind) for i, kind in enumerate(kinds)]
    scarce = {"max_running": 12, "page_size": 16, "kv_gb": 35 * 16 * 512 / 1e9}
    expected = Engine(path, **scarce).generate(prompts, params)
    engine = Engine(path, **scarce)
    graphs, _ = use_graphs(engine, monkeypatch)
    launches = use_kernels(engine, monkeypatch)
    engine._is_async = True
    with launches:
        assert [c.token_ids for c in engine.generate(prompts, params)] == [c.token_ids for c in expected]
    assert {draws for *_, draws in graphs._graphs} == {True, False} and "sort" in launches.names
    assert engine.scheduler.num_preempted > 0


def test_a_sequence_that_returns_has_seen_the_tokens_of_its_environment(tmp_path, monkeypatch):
    path, outcomes = tiny_policy(tmp_path), []
    for is_captured in (False, True):
        engine = Engine(path, max_running=4)
        if is_captured:
            use_graphs(engine, monkeypatch)
            use_kernels(engine, monkeypatch)
            engine._is_async = True
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=0, repetition_penalty=3.0)
        engine.add_group([5, 6, 7], params, [0, 1])
        for _ in range(5):
            engine.step()
        assert engine.pause(1) and engine.resume(1, range(40, 80))
        done = {}
        while not engine.idle:
            done |= {c.trajectory_id: c.token_ids for c in engine.step()}
        outcomes.append(done)
    assert outcomes[0] == outcomes[1] and outcomes[0][0] != outcomes[0][1]


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_runner_takes_space_for_the_results_of_operators_where_plain_sampling_has_no_kernels(
    tmp_path, monkeypatch, has_kernels
):
    monkeypatch.setattr(runner, "has_kernels", lambda device: has_kernels)
    found = runner.Runner(load_policy(tiny_policy(tmp_path)), 2, exact=False)
    assert (found._scratch is None) == has_kernels
