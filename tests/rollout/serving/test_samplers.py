"""Samples from versions of the weights: each token is drawn by the weights that its result names."""

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support.policies import plain_logprobs, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.comm.recipe import LoraSettings
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.serving.samplers import SampleJob, SampleResult, Samplers, Target, WeightVersion
from headrace.trainer.policy.lora import adapter_weights, add_adapter
from headrace.trainer.policy.model import load_policy

PROMPT = [5, 6, 7, 8]


class Asked:
    """A job and its result."""

    def __init__(self, samplers: Samplers, target: Target, num_scored: int = 0, prompt: list[int] = PROMPT, **params):
        self.result: SampleResult | Exception | None = None
        values = {"max_new_tokens": 12, "n": 2, "seed": 1, "ignore_eos": True, **params}
        self.job = SampleJob(target, prompt, SamplingParams(**values), self._finish, num_scored)
        samplers.submit(self.job)

    def _finish(self, result: SampleResult | Exception) -> None:
        assert self.result is None, "it finishes once"
        self.result = result

    @property
    def found(self) -> SampleResult:
        assert isinstance(self.result, SampleResult), self.result
        return self.result


def run(samplers: Samplers) -> None:
    for _ in range(10000):
        if not samplers.turn():
            return
    raise AssertionError("it does not end")


def other_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    return dict(load_policy(tiny_policy(folder / str(seed), seed=seed)).weights())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_policy(tmp_path)


@pytest.fixture
def samplers(path: Path) -> Samplers:
    return Samplers(Engine(path, max_running=4))


def assert_drawn_by(weights: Mapping[str, torch.Tensor], path: Path, asked: Asked) -> None:
    """The log-probs of all tokens are those of these weights."""
    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict({**model.state_dict(), **weights})
    for response in asked.found.responses:
        expected = plain_logprobs(model, asked.job.prompt, response.token_ids)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_jobs_of_several_versions_get_their_own_weights(samplers: Samplers, path: Path, tmp_path: Path):
    weights = {number: other_weights(tmp_path, number) for number in (1, 2)}
    targets = {number: Target(WeightVersion(number, each)) for number, each in weights.items()}
    asked = [(number, Asked(samplers, targets[number], seed=i)) for i, number in enumerate((1, 2, 1, 2))]
    first = Asked(samplers, samplers.initial)
    run(samplers)
    for number, each in asked:
        assert_drawn_by(weights[number], path, each)
        assert all(set(response.versions) == {number} for response in each.found.responses)
    assert_drawn_by({}, path, first)
    assert [r.token_ids for r in first.found.responses] == [
        done.token_ids
        for done in Engine(path, max_running=4).generate(
            [PROMPT], SamplingParams(max_new_tokens=12, n=2, seed=1, ignore_eos=True)
        )
    ]


def test_an_adapter_is_merged_into_the_initial_weights(samplers: Samplers, path: Path):
    settings = LoraSettings(rank=4, alpha=8)
    adapted = load_policy(path, shard=lambda p: add_adapter(p.model, settings, 0, torch.float32))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, matrix in adapter_weights(adapted.model).items():
            matrix.normal_(0, 0.1) if name.endswith("lora_B") else None
    matrices = {name: matrix.detach() for name, matrix in adapter_weights(adapted.model).items()}
    asked = [Asked(samplers, Target(WeightVersion(n, matrices, 2.0))) for n in (1, 2)]  # rounding does not add up
    run(samplers)
    tokens = torch.tensor([PROMPT + asked[0].found.responses[0].token_ids])[0]
    with torch.no_grad():
        hidden = adapted.forward_packed(tokens, torch.tensor([0, len(tokens)], dtype=torch.int32))
        expected = adapted.token_logprobs(hidden[len(PROMPT) - 1 : -1], tokens[len(PROMPT) :])[0]
    for each in asked:
        torch.testing.assert_close(torch.tensor(each.found.responses[0].logprobs), expected, rtol=1e-4, atol=1e-4)


def test_replaced_weights_go_on_with_the_sequences_and_each_token_has_its_version(
    samplers: Samplers, path: Path, tmp_path: Path
):
    new = other_weights(tmp_path, 2)
    target = Target(WeightVersion(1, other_weights(tmp_path, 1)))
    asked = Asked(samplers, target, n=1)
    for _ in range(5):
        samplers.turn()
    target.replace(WeightVersion(2, new))
    run(samplers)
    (response,) = asked.found.responses
    num_old = response.versions.count(1)
    assert 0 < num_old < 12 and response.versions == [1] * num_old + [2] * (12 - num_old)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict({**model.state_dict(), **new})
    expected = plain_logprobs(model, PROMPT, response.token_ids)[num_old:]
    torch.testing.assert_close(torch.tensor(response.logprobs[num_old:]), expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_is_scored_under_the_weights_of_its_target(samplers: Samplers, path: Path, tmp_path: Path):
    weights = other_weights(tmp_path, 1)
    whole = Asked(samplers, Target(WeightVersion(1, weights)), num_scored=4)
    last = Asked(samplers, Target(WeightVersion(1, weights)), num_scored=2)
    run(samplers)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict({**model.state_dict(), **weights})
    expected = plain_logprobs(model, PROMPT[:1], PROMPT[1:]).numpy()
    scores = whole.found.prompt_logprobs
    assert scores is not None and np.isnan(scores[0])
    np.testing.assert_allclose(scores[1:], expected, rtol=1e-4, atol=1e-4)
    scores = last.found.prompt_logprobs
    assert scores is not None and np.isnan(scores[:2]).all()
    np.testing.assert_allclose(scores[2:], expected[1:], rtol=1e-4, atol=1e-4)


def test_a_cancelled_job_never_finishes_and_frees_the_engine(samplers: Samplers):
    running = Asked(samplers, samplers.initial)
    samplers.turn()
    waiting = Asked(samplers, samplers.initial)
    other = Asked(samplers, samplers.initial, n=1)
    for each in (running, waiting):
        samplers.cancel(each.job)
    run(samplers)
    assert running.result is None and waiting.result is None and len(other.found.responses) == 1
    assert samplers.engine.idle and samplers.num_samples == 0
    samplers.engine.check()


def test_weights_that_cannot_be_read_fail_their_jobs_alone(samplers: Samplers):
    def read() -> WeightVersion:
        raise SettingError("tinker://a/sampler_weights/b is gone")

    lost = Target(read)
    asked = [Asked(samplers, target) for target in (lost, samplers.initial, lost)]
    run(samplers)
    for each in (asked[0], asked[2]):
        assert isinstance(each.result, SettingError) and "is gone" in str(each.result)
    assert len(asked[1].found.responses) == 2


def test_a_target_does_not_keep_another_one_waiting_for_ever(
    samplers: Samplers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.rollout.serving.samplers.PATIENCE_S", 0.0)
    other = Target(WeightVersion(1, other_weights(tmp_path, 1)))
    Asked(samplers, samplers.initial)
    samplers.turn()
    waits = Asked(samplers, other)
    for seed in range(200):  # one new job for each step
        Asked(samplers, samplers.initial, seed=seed, n=1)
        samplers.turn()
        if waits.result is not None:
            return
    raise AssertionError("it waited for ever")


def test_jobs_come_from_any_thread(samplers: Samplers):
    threads = [threading.Thread(target=Asked, args=(samplers, samplers.initial)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert samplers.has_work.is_set() and samplers.num_samples == 8
    run(samplers)
