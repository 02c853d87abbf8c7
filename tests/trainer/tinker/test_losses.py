"""Each loss is the sum that the Tinker API documents, in float64 NumPy, and its gradient the formula's finite differences."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.comm.errors import SettingError
from headrace.trainer.tinker.losses import CLIP_HIGH, CLIP_LOW, LOSSES, open_loss

NUM_TOKENS = 12
LOW, HIGH = 0.7, 1.1
SETTINGS = {CLIP_LOW: LOW, CLIP_HIGH: HIGH}
Case = dict[str, np.ndarray]
Formula = Callable[[np.ndarray, Case, np.ndarray], float]
"""The sum of the loss, of log-probs, the inputs, and log-probs that carry no gradient."""


def ppo(new: np.ndarray, given: Case, frozen: np.ndarray) -> float:
    del frozen
    ratio = np.exp(new - given["logprobs"])
    kept = np.minimum(ratio * given["advantages"], np.clip(ratio, LOW, HIGH) * given["advantages"])
    return -kept.sum()


FORMULAS: dict[str, Formula] = {
    "cross_entropy": lambda new, given, frozen: (-new * given["weights"]).sum(),
    "importance_sampling": lambda new, given, frozen: -(np.exp(new - given["logprobs"]) * given["advantages"]).sum(),
    "ppo": ppo,
    "cispo": lambda new, given, frozen: (
        -(np.clip(np.exp(frozen - given["logprobs"]), LOW, HIGH) * new * given["advantages"]).sum()
    ),
}


def case(seed: int = 0) -> tuple[np.ndarray, Case]:
    rng = np.random.default_rng(seed)
    old = -rng.gamma(2.0, 0.6, NUM_TOKENS)
    given = {name: rng.normal(0, 1, NUM_TOKENS) for name in ("advantages", "weights")}
    return old + rng.normal(0, 0.4, NUM_TOKENS), {"logprobs": old, **given}


def value(name: str, new: torch.Tensor, given: Case) -> torch.Tensor:
    loss, settings = open_loss(name, SETTINGS if LOSSES[name].settings else {})
    return loss.formula(new, {key: torch.from_numpy(array) for key, array in given.items()}, settings).sum()


def test_each_loss_has_a_formula():
    assert FORMULAS.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_are_those_of_the_formula(name: str, seed: int):
    new, given = case(seed)
    logprobs = torch.tensor(new, requires_grad=True)
    found = value(name, logprobs, given)
    assert found.item() == pytest.approx(FORMULAS[name](new, given, new), rel=1e-12)
    found.backward()
    step = 1e-6
    for token in range(NUM_TOKENS):
        shift = step * np.eye(NUM_TOKENS)[token]
        expected = (FORMULAS[name](new + shift, given, new) - FORMULAS[name](new - shift, given, new)) / (2 * step)
        assert logprobs.grad is not None and logprobs.grad[token].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_without_weight_adds_nothing_however_unlikely_it_is(name: str):
    new, given = case()
    given = {key: array.copy() for key, array in given.items()}
    expected = value(name, torch.tensor(new[1:]), {key: array[1:] for key, array in given.items()})
    given["advantages"][0] = given["weights"][0] = 0.0
    given["logprobs"][0] = -1e4  # as the ratio it would be infinite
    new[0] = -1.0 if name != "cross_entropy" else -np.inf
    logprobs = torch.tensor(new, requires_grad=True)
    found = value(name, logprobs, given)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    found.backward()
    assert logprobs.grad is not None and logprobs.grad[0] == 0 and logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("stable_reinforce", {}, "loss_fn: 'stable_reinforce' is not supported; this server has cross_entropy,"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config.beta: cross_entropy has no such setting; it has none"),
        ("ppo", {CLIP_LOW: "x"}, "loss_fn_config.clip_low_threshold: must be a finite number, not 'x'"),
        ("ppo", {CLIP_LOW: float("nan")}, "must be a finite number"),
        ("cispo", {CLIP_LOW: 1.5}, "clip_low_threshold: 1.5 is above clip_high_threshold"),
    ],
)
def test_what_a_loss_does_not_have_is_refused_by_name(name: str, settings: dict[str, float | str], message: str):
    with pytest.raises(SettingError, match=message.replace("(", r"\(")):
        open_loss(name, settings)


def test_the_clip_is_by_default_that_of_the_documentation():
    assert open_loss("ppo", {})[1] == {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}
