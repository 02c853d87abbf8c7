"""vLLM as an engine against the built-in one, which draws by the same numbers: equal tokens, equal log-probs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.policies import random_prompts, tiny_policy
from torch import Tensor

from headrace.comm.errors import SettingError
from headrace.rollout import Completion, Engine, SamplingParams
from headrace.rollout.engine.text import Text
from headrace.rollout.generators.vllm_engine.engine import VllmEngine
from headrace.trainer.policy.model import load_policy, load_tokenizer

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

LAYOUT = {"head_dim": 32, "tie_word_embeddings": True}
"""Heads that vLLM has a kernel for; a tied head is the one that its reload forgets."""
CLOSE = 2e-5
PLAIN = SamplingParams(max_new_tokens=30)
DRAWS = {
    "plain": PLAIN,
    "temperature": SamplingParams(max_new_tokens=30, temperature=0.6),
    "top_p": SamplingParams(max_new_tokens=30, temperature=0.8, top_p=0.7),
    "top_k and min_p": SamplingParams(max_new_tokens=30, temperature=1.2, top_k=9, min_p=0.05),
    "penalty": SamplingParams(max_new_tokens=30, temperature=0.8, top_p=0.9, repetition_penalty=1.4),
    "greedy": SamplingParams(max_new_tokens=30, temperature=0),
    "greedy with a penalty": SamplingParams(max_new_tokens=30, temperature=0, repetition_penalty=1.4),
    "stop string": SamplingParams(max_new_tokens=60, stop=("a", "e ")),
    "stop id": SamplingParams(max_new_tokens=60, stop=(40, 41, 42)),
    "own seed": SamplingParams(max_new_tokens=30, seed=77),
    "past the end": SamplingParams(max_new_tokens=60, ignore_eos=True),
}

AnyEngine = Engine | VllmEngine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("vllm"), **LAYOUT)


@pytest.fixture(scope="module")
def vllm(path: Path) -> VllmEngine:
    """One engine for all tests: vLLM keeps state of the process. Its prompts are prefilled in chunks, and pages are preempted."""
    engine = VllmEngine(load_policy(path), str(path), Text.of(path), max_running=6, kv_gb=0.0006, prefill_tokens=40)
    engine.weights_changed()
    return engine


def switch(engine: AnyEngine, weights: Mapping[str, Tensor]) -> None:
    """Replace the weights as a rollout does."""
    engine.recompute()
    for name, weight in engine.policy.weights().items():
        weight.data.copy_(weights[name])
    engine.weights_changed()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest):
    yield
    if "vllm" in request.fixturenames:
        engine = request.getfixturevalue("vllm")
        assert engine.idle and not engine.num_running and not engine.num_waiting and engine.kv_load == 0


def finish(engine: AnyEngine) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while not engine.idle:
        found |= {done.trajectory_id: done for done in engine.step()}
    return found


def assert_same(found: Mapping[int, Completion], expected: Mapping[int, Completion]) -> None:
    assert found.keys() == expected.keys()
    for number, wanted in expected.items():
        got = found[number]
        assert (got.prompt_ids, got.token_ids) == (wanted.prompt_ids, wanted.token_ids), number
        assert (got.finish_reason, got.text) == (wanted.finish_reason, wanted.text)
        assert max(abs(a - b) for a, b in zip(got.logprobs, wanted.logprobs, strict=True)) < CLOSE


def on_both(path: Path, vllm: VllmEngine, work: Callable[[Any], dict[int, Completion]]) -> dict[int, Completion]:
    """What vLLM finds, which is what the built-in engine finds."""
    found = work(vllm)
    assert_same(found, work(Engine(path, max_running=6)))
    return found


def test_tokens_and_log_probs_are_those_of_the_built_in_engine(path: Path, vllm: VllmEngine):
    """Groups of every way of sampling in one batch, more than run at once; prompts share and cross pages."""

    def work(engine: AnyEngine) -> dict[int, Completion]:
        number = 0
        for params, prompt in zip(DRAWS.values(), random_prompts(len(DRAWS), longest=120), strict=True):
            engine.add_group(prompt, params, [number, number + 1, number + 2])
            number += 3
        return finish(engine)

    found = on_both(path, vllm, work)
    assert len(found) == 3 * len(DRAWS)
    assert {done.finish_reason for done in found.values()} == {"stop", "length"}


def test_log_probs_are_the_policys_at_the_temperature_before_the_filters(path: Path, vllm: VllmEngine):
    prompt = random_prompts(1, longest=50)[0]
    vllm.add_group(prompt, SamplingParams(max_new_tokens=40, temperature=0.7, top_k=4, ignore_eos=True), [5])
    done = finish(vllm)[5]
    policy = load_policy(path, "float64")
    tokens = torch.tensor(prompt + done.token_ids)
    hidden = policy.forward_packed(tokens, torch.tensor([0, len(tokens)]))
    logits = (hidden @ policy.head.weight.T)[len(prompt) - 1 : -1] / 0.7
    wanted = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
    assert (torch.tensor(done.logprobs) - wanted).abs().max() < CLOSE


def test_a_token_that_vllm_drops_is_not_penalized(path: Path, vllm: VllmEngine):
    """The rows of prompts in chunks are drawn too. Nothing else changes the batch meanwhile."""

    def work(engine: AnyEngine) -> dict[int, Completion]:
        prompt = [20 + i % 5 for i in range(200)]
        params = SamplingParams(max_new_tokens=50, temperature=0.5, repetition_penalty=6.0, ignore_eos=True)
        engine.add_group(prompt, params, [3])
        return finish(engine)

    on_both(path, vllm, work)


def test_the_context_ends_a_response(path: Path, vllm: VllmEngine):
    prompt = [5 + i % 90 for i in range(250)]
    vllm.add_group(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True), [0])
    done = finish(vllm)[0]
    assert (len(done.token_ids), done.finish_reason) == (6, "length")
    with pytest.raises(SettingError, match="no room in the policy's context of 256"):
        vllm.add_group([5] * 256, PLAIN, [1])


def changed(path: Path, by: float = 1.0) -> dict[str, Tensor]:
    """Other weights of the same shapes, the tied embedding among them."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: weight + 0.05 * by * torch.randn(weight.shape, generator=generator)
        for name, weight in load_policy(path).weights().items()
    }


def test_new_weights_midway_are_those_of_the_next_token(path: Path, vllm: VllmEngine):
    """With the built-in engine as the oracle, which recomputes its cache under them."""
    first = load_policy(path).weights()
    second = changed(path)
    found: list[dict[int, Completion]] = []
    for engine in (vllm, Engine(load_policy(path), max_running=6, tokenizer=load_tokenizer(path))):
        engine.add_group(random_prompts(1, longest=90)[0], SamplingParams(max_new_tokens=40, ignore_eos=True), [1, 2])
        early = {done.trajectory_id: done for _ in range(12) for done in engine.step()}
        before = engine.num_recomputed
        switch(engine, second)
        found.append(early | finish(engine))
        assert engine.num_recomputed > before
    switch(vllm, first)
    assert_same(*found)
    vllm.add_group(random_prompts(1, longest=90)[0], SamplingParams(max_new_tokens=40, ignore_eos=True), [1, 2])
    unchanged = finish(vllm)
    assert unchanged[1].token_ids[:12] == found[0][1].token_ids[:12] and unchanged[1].token_ids != found[0][1].token_ids


def test_a_turn_pauses_and_goes_on_after_inserted_tokens(path: Path, vllm: VllmEngine):
    def work(engine: AnyEngine) -> dict[int, Completion]:
        params = SamplingParams(max_new_tokens=120, stop="a", pause_at_stop=True)
        engine.add_group(random_prompts(1, longest=70)[0], params, [1, 2, 3])
        turns: dict[int, Completion] = {}
        num_resumed = 0
        while not engine.idle:
            for done in engine.step():
                turns[100 * num_resumed + done.trajectory_id] = done
                if done.finish_reason == "stop" and num_resumed < 5:
                    assert any(live.trajectory_id == done.trajectory_id for live in engine.unfinished())
                    assert engine.resume(done.trajectory_id, [50, 51, 52])
                    num_resumed += 1
                elif done.finish_reason == "stop":
                    assert not engine.resume(done.trajectory_id, [50] * 120)
                    engine.export_sequences([done.trajectory_id])
        return turns

    found_before = vllm.num_found
    found = on_both(path, vllm, work)
    assert len(found) >= 6 and vllm.num_found > found_before
    last = max(found.values(), key=lambda done: len(done.token_ids))
    assert [p for t, p in zip(last.token_ids, last.logprobs, strict=True) if p == 0.0] == [
        0.0
    ] * 3 * last.token_ids.count(51)


@pytest.mark.parametrize("way", ["to the built-in engine", "from the built-in engine", "to itself"])
def test_a_trajectory_goes_on_elsewhere_as_if_unbroken(path: Path, vllm: VllmEngine, way: str):
    params = SamplingParams(max_new_tokens=50, temperature=0.9, top_p=0.9, ignore_eos=True)
    prompt = random_prompts(1, longest=60)[0]
    whole = Engine(path)
    whole.add_group(prompt, params, [8, 9])
    expected = finish(whole)
    builtin = Engine(path)
    source, target = {"to the": (vllm, builtin), "from t": (builtin, vllm), "to its": (vllm, vllm)}[way[:6]]
    source.add_group(prompt, params, [8, 9])
    for _ in range(20):
        source.step()
    assert [len(state.token_ids) for state in source.responses()] == [20, 20]
    states = source.export_sequences([8, 9], with_cache=True)
    assert source.idle
    target.import_sequences(states)
    assert_same(finish(target), expected)


def test_weights_that_are_not_finite_end_a_response_and_good_ones_heal_the_engine(path: Path, vllm: VllmEngine):
    good = load_policy(path).weights()
    broken = {name: torch.full_like(weight, float("nan")) for name, weight in good.items()}
    prompt = random_prompts(1, longest=60)[0]
    switch(vllm, broken)
    vllm.add_group(prompt, PLAIN, [1])
    done = finish(vllm)[1]
    assert (done.finish_reason, done.token_ids, done.logprobs) == ("error", [], [])
    switch(vllm, good)

    def work(engine: AnyEngine) -> dict[int, Completion]:
        engine.add_group(prompt, PLAIN, [1])
        return finish(engine)

    on_both(path, vllm, work)


def test_weights_that_vllm_does_not_find_are_an_error(vllm: VllmEngine, monkeypatch: pytest.MonkeyPatch):
    weights = vllm.policy.weights()
    with monkeypatch.context() as patch:
        patch.setattr(vllm.policy, "weights", lambda: {n: w for n, w in weights.items() if n != "model.norm.weight"})
        with pytest.raises(SettingError, match=r"rollout\.engine=vllm: vLLM found no weights for model\.norm\.weight"):
            vllm.weights_changed()
    vllm.weights_changed()


def test_heads_without_a_kernel_are_refused_at_the_start(tmp_path: Path):
    path = tiny_policy(tmp_path, head_dim=16)
    with pytest.raises(SettingError, match=r"rollout\.engine=vllm: on a CPU vLLM has no attention for heads of 16"):
        VllmEngine(load_policy(path), str(path), Text(), max_running=2)


def test_a_model_that_vllm_does_not_know_is_one_line(tmp_path: Path):
    path = tiny_policy(tmp_path, **LAYOUT)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    with pytest.raises(SettingError) as error:
        VllmEngine(load_policy(path), str(path), Text(), max_running=2, kv_gb=0.01)
    assert str(error.value).startswith("rollout.engine=vllm: ") and "NoSuchForCausalLM" in str(error.value)
    assert "\n" not in str(error.value)
