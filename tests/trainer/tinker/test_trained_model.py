"""A model that a client trains: plain PyTorch makes the same log-probs, gradients and updates."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.policies import plain_logprobs, random_prompts, tiny_policy
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.comm.recipe import LoraSettings, ModelSettings, OptimizerSettings, Recipe
from headrace.trainer.policy.lora import is_adapter
from headrace.trainer.tinker.datum import Datum
from headrace.trainer.tinker.trained_model import AdamParams, TrainedModel

PARAMS = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)


def model_of(path: Path, rank: int = 0, micro_tokens: int = 2048) -> TrainedModel:
    recipe = Recipe(model=ModelSettings(path=str(path), dtype="float32"))
    lora = LoraSettings(rank=rank, alpha=8)
    return TrainedModel(replace(recipe, lora=lora, optimizer=OptimizerSettings(micro_tokens=micro_tokens)))


def data_of(count: int = 5, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    found = []
    for tokens in random_prompts(count, 30, seed):
        whole = np.array([*tokens, 7])
        weights = rng.normal(0, 1, len(tokens)).astype(np.float32)
        found.append(Datum(whole[:-1], {"target_tokens": whole[1:], "weights": weights}))
    return found


def plain_update(path: Path, data: list[Datum]) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the loss, and the weights after one AdamW of PyTorch."""
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(PARAMS.beta1, PARAMS.beta2), eps=PARAMS.eps, weight_decay=0.1
    )
    total = torch.zeros(())
    for datum in data:
        logits = model(torch.from_numpy(datum.token_ids)[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        logprobs = logits.log_softmax(-1).gather(1, targets)[:, 0]
        total = total - (logprobs * torch.from_numpy(datum.inputs["weights"])).sum()
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total.item(), dict(model.named_parameters())


@pytest.mark.parametrize("micro_tokens", [2048, 16])
def test_an_update_is_that_of_plain_pytorch(tmp_path: Path, micro_tokens: int):
    path = tiny_policy(tmp_path)
    data = data_of()
    loss, expected = plain_update(path, data)
    model = model_of(path, micro_tokens=micro_tokens)
    # In two requests: gradients add up.
    parts = [model.accumulate(part, "cross_entropy", {}, needs_gradient=True) for part in (data[:2], data[2:])]
    assert sum(part.loss for part in parts) == pytest.approx(loss, rel=1e-5)
    metrics = model.step(PARAMS)
    assert metrics["grad_norm"] > 0.5  # it was clipped
    found = model.sampler_weights()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-5)


def test_logprobs_come_in_the_order_of_the_data_whatever_their_lengths(tmp_path: Path):
    path = tiny_policy(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    data = data_of(8)
    found = model_of(path, micro_tokens=32).accumulate(data, "cross_entropy", {}, needs_gradient=False)
    for datum, logprobs in zip(data, found.logprobs, strict=True):
        first, *rest = [*datum.token_ids.tolist(), 7]
        torch.testing.assert_close(
            torch.from_numpy(logprobs), plain_logprobs(plain, [first], rest), rtol=1e-4, atol=1e-4
        )


def test_a_forward_pass_leaves_no_gradient(tmp_path: Path):
    model = model_of(tiny_policy(tmp_path))
    model.accumulate(data_of(), "cross_entropy", {}, needs_gradient=False)
    with pytest.raises(SettingError, match="there was no forward_backward since the last one"):
        model.step(PARAMS)


def test_an_adapter_is_trained_alone(tmp_path: Path):
    model = model_of(tiny_policy(tmp_path), rank=4)
    before = model.sampler_weights()
    assert all(is_adapter(name) for name in before)
    model.accumulate(data_of(), "cross_entropy", {}, needs_gradient=True)
    model.step(PARAMS)
    after = model.sampler_weights()
    assert all((after[name] != before[name]).any() for name in before if name.endswith("lora_B"))


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path):
    model = model_of(tiny_policy(tmp_path))
    (datum,) = data_of(1)
    huge = np.full(datum.num_tokens, 3e38, np.float32)
    model.accumulate(
        [Datum(datum.token_ids, {**datum.inputs, "weights": huge})], "cross_entropy", {}, needs_gradient=True
    )
    before = model.sampler_weights()
    with pytest.raises(SettingError, match="the weights stay as they are"):
        model.step(PARAMS)
    assert all(torch.equal(weight, before[name]) for name, weight in model.sampler_weights().items())


@pytest.mark.parametrize("rank", [0, 4])
def test_saved_state_continues_with_or_without_the_moments(tmp_path: Path, rank: int):
    path = tiny_policy(tmp_path)
    model = model_of(path, rank)

    def update(seed: int) -> dict[str, torch.Tensor]:
        model.accumulate(data_of(seed=seed), "cross_entropy", {}, needs_gradient=True)
        model.step(PARAMS)
        return model.sampler_weights()

    saved = update(1)
    model.write(tmp_path / "saved")
    expected = update(2)
    model.load(tmp_path / "saved", with_optimizer=True)
    assert all(torch.equal(weight, saved[name]) for name, weight in model.sampler_weights().items())
    assert model.num_updates == 1
    again = update(2)
    assert all(torch.equal(weight, expected[name]) for name, weight in again.items())
    model.load(tmp_path / "saved", with_optimizer=False)
    assert all(torch.equal(weight, saved[name]) for name, weight in model.sampler_weights().items())
    assert any((weight != expected[name]).any() for name, weight in update(2).items())


def test_discarded_gradients_are_gone(tmp_path: Path):
    path = tiny_policy(tmp_path)
    model = model_of(path)
    model.accumulate(data_of(seed=3), "cross_entropy", {}, needs_gradient=True)
    model.discard()
    model.accumulate(data_of(), "cross_entropy", {}, needs_gradient=True)
    model.step(PARAMS)
    expected = plain_update(path, data_of())[1]
    for name, weight in model.sampler_weights().items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-4, atol=1e-5)


TOKENS = np.array([4, 5, 6])
GOOD = {"target_tokens": TOKENS, "weights": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data: has no datum"),
        ([Datum(TOKENS[:0], GOOD)], r"data\[0\].model_input: 0 tokens"),
        ([Datum(np.full(300, 4), GOOD)], r"data\[0\].model_input: 300 tokens; the context has 1 to 256"),
        ([Datum(TOKENS + 200, GOOD)], r"model_input: has token ids outside the vocabulary of 128"),
        ([Datum(TOKENS, {"weights": GOOD["weights"]})], r"loss_fn_inputs.target_tokens: is missing"),
        ([Datum(TOKENS, {**GOOD, "extra": TOKENS})], "loss_fn_inputs.extra: this loss does not read it"),
        ([Datum(TOKENS, GOOD), Datum(TOKENS, {**GOOD, "weights": np.ones(2)})], r"data\[1\]..*has the shape \[2\]"),
        ([Datum(TOKENS, {**GOOD, "target_tokens": np.ones((3, 2), int)})], r"has the shape \[3, 2\]"),
        ([Datum(TOKENS, {**GOOD, "target_tokens": np.ones(3)})], "token ids must be whole numbers, not float64"),
        ([Datum(TOKENS, {**GOOD, "weights": np.full(3, np.nan)})], "has a number that is not finite"),
    ],
)
def test_wrong_data_are_refused_by_their_field(tmp_path: Path, data: list[Datum], message: str):
    with pytest.raises(SettingError, match=message):
        model_of(tiny_policy(tmp_path)).accumulate(data, "cross_entropy", {}, needs_gradient=True)


@pytest.mark.parametrize("params", [AdamParams(learning_rate=-1), AdamParams(beta1=1.0), AdamParams(eps=float("nan"))])
def test_wrong_parameters_of_an_update_are_refused(params: AdamParams):
    with pytest.raises(SettingError, match="adam_params"):
        params.check()
