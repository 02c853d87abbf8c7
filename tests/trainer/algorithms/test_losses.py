"""Each loss equals its paper's formula in float64 NumPy, and its gradient the formula's finite differences."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.source_tree import ROOT

from headrace.comm.errors import SettingError
from headrace.comm.recipe import AlgorithmSettings
from headrace.launch.config.load import read_recipe
from headrace.trainer.algorithms.advantages import open_estimator
from headrace.trainer.algorithms.losses import LOSSES, LossInputs, open_loss

LENGTHS = (4, 1, 3)
LOW, HIGH, DUAL = 0.2, 0.28, 1.5
Formula = Callable[[np.ndarray, np.ndarray, float, np.ndarray], np.ndarray]
"""Loss of each token of one response, of log-probs, old log-probs, the advantage, and log-probs that carry no gradient."""


def surrogate(ratio: np.ndarray, advantage: float, dual: float | None = None) -> np.ndarray:
    kept = np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    return -(np.maximum(kept, dual * advantage) if dual and advantage < 0 else kept)


def gspo(new: np.ndarray, old: np.ndarray, advantage: float, frozen: np.ndarray) -> np.ndarray:
    del frozen
    ratio = (np.exp(new.sum()) / np.exp(old.sum())) ** (1 / len(new))
    return np.full(len(new), surrogate(ratio, advantage))


FORMULAS: dict[tuple[str, float | None], Formula] = {
    ("clip", None): lambda new, old, advantage, frozen: surrogate(np.exp(new - old), advantage),
    ("clip", DUAL): lambda new, old, advantage, frozen: surrogate(np.exp(new - old), advantage, DUAL),
    ("gspo", None): gspo,
    ("cispo", None): lambda new, old, advantage, frozen: (
        -np.clip(np.exp(frozen - old), 1 - LOW, 1 + HIGH) * advantage * new
    ),
    ("reinforce", None): lambda new, old, advantage, frozen: -advantage * new,
}


def test_the_recipe_takes_each_loss_by_its_name_and_each_has_a_formula():
    for name in LOSSES:
        assert read_recipe(None, [f"algorithm.loss={name}"]).algorithm.loss == name
    assert {name for name, _ in FORMULAS} == LOSSES.keys()


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs [R], old log-probs [R], advantages of the responses [n]."""
    rng = np.random.default_rng(seed)
    old = -rng.gamma(2.0, 0.6, sum(LENGTHS))
    return old + rng.normal(0, 0.4, len(old)), old, rng.normal(0, 1, len(LENGTHS))


def inputs_of(new: torch.Tensor, old: np.ndarray, advantages: np.ndarray, dual: float | None = None) -> LossInputs:
    lengths = torch.tensor(LENGTHS)
    return LossInputs(
        logprobs=new,
        proximal_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages).repeat_interleave(lengths),
        mask=torch.ones(len(new), dtype=torch.float64),
        lengths=lengths,
        clip_low=LOW,
        clip_high=HIGH,
        behaviour_logprobs=torch.tensor(old),
        clip_dual=dual,
    )


def expected(formula: Formula, new: np.ndarray, old: np.ndarray, advantages: np.ndarray, frozen: np.ndarray):
    ends = np.cumsum(LENGTHS)
    parts = [slice(end - n, end) for end, n in zip(ends, LENGTHS, strict=True)]
    return np.concatenate(
        [formula(new[p], old[p], advantage, frozen[p]) for p, advantage in zip(parts, advantages, strict=True)]
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "dual"), FORMULAS)
def test_a_loss_equals_its_formula_and_its_gradient_the_finite_differences(name: str, dual: float | None, seed: int):
    new, old, advantages = random_case(seed)
    formula = FORMULAS[name, dual]
    logprobs = torch.tensor(new, requires_grad=True)
    loss, _ = open_loss(name)(inputs_of(logprobs, old, advantages, dual))
    assert loss.detach().numpy() == pytest.approx(expected(formula, new, old, advantages, new), abs=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    for token in range(len(new)):
        step = np.zeros(len(new))
        step[token] = 1e-6
        above, below = (expected(formula, new + s, old, advantages, new).sum() for s in (step, -step))
        assert gradient[token].item() == pytest.approx((above - below) / 2e-6, abs=1e-6)


def clipped(name: str, new: list[float], old: list[float], advantages: list[float], dual: float | None = None):
    x = LossInputs(
        *(torch.tensor(values, dtype=torch.float64) for values in (new, old, advantages)),
        mask=torch.ones(len(new), dtype=torch.float64),
        lengths=torch.tensor([len(new)]),
        clip_low=LOW,
        clip_high=HIGH,
        behaviour_logprobs=torch.tensor(old),
        clip_dual=dual,
    )
    return open_loss(name)(x)[1].tolist()


def test_tokens_whose_ratio_the_clip_bounds_are_marked():
    ratios = [0.3, -0.3, 0.3, -0.3, 0.1]
    assert clipped("clip", ratios, [0.0] * 5, [1, 1, -1, -1, 1]) == [True, False, False, True, False]
    assert clipped("clip", [0.5, 0.5], [0.0] * 2, [-1, 1], dual=DUAL) == [True, True]
    assert clipped("clip", [0.3], [0.0], [-1], dual=DUAL) == [False]
    assert clipped("cispo", ratios, [0.0] * 5, [1, 1, -1, -1, 1]) == [True, True, True, True, False]
    assert clipped("gspo", [0.9, -0.3], [0.0] * 2, [1, 1]) == [True, True]
    assert clipped("reinforce", [9.0], [0.0], [1.0]) == [False]


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_with_a_ratio_beyond_all_bounds_gives_a_finite_gradient(name: str):
    logprobs = torch.tensor([-1.0, -0.1, -200.0, -3.0], dtype=torch.float64, requires_grad=True)
    x = LossInputs(
        logprobs,
        torch.tensor([-1.0, -1000.0, -0.1, -torch.inf], dtype=torch.float64),
        torch.tensor([1.0, 0.0, -1.0, -1.0], dtype=torch.float64),
        torch.ones(4, dtype=torch.float64),
        torch.tensor([4]),
        LOW,
        HIGH,
        torch.tensor([-1.0, -1000.0, -0.1, -torch.inf], dtype=torch.float64),
    )
    (gradient,) = torch.autograd.grad(open_loss(name)(x)[0].sum(), logprobs)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("-x.advantages * x.logprobs", "a tensor of shape \\[8\\]"),
        ("x.mask.sum(), x.mask > 1", "a tensor of shape \\[\\]"),
        ("None", "NoneType"),
    ],
)
def test_a_users_loss_that_returns_anything_else_names_its_setting(tmp_path: Path, result: str, shown: str):
    (tmp_path / "mine.py").write_text(f"def wrong(x):\n    return {result}\n")
    new, old, advantages = random_case(0)
    with pytest.raises(SettingError, match=f"algorithm.loss: the function returns .*{shown}"):
        open_loss(f"{tmp_path}/mine.py:wrong")(inputs_of(torch.tensor(new), old, advantages))


def test_a_users_loss_is_a_function_in_a_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def double(x):\n    return -2 * x.advantages * x.logprobs, x.mask > 1\n")
    new, old, advantages = random_case(0)
    loss, bounded = open_loss(f"{tmp_path}/mine.py:double")(inputs_of(torch.tensor(new), old, advantages))
    assert loss.tolist() == pytest.approx(-2 * np.repeat(advantages, LENGTHS) * new)
    assert not bounded.any()


def test_the_loss_and_the_advantage_of_the_page_are_those_that_it_says(tmp_path: Path):
    page = (ROOT / "docs" / "use" / "algorithms.md").read_text()
    (example,) = re.findall(r"```python\n(# own\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "own.py").write_text(example)
    for seed in range(4):
        new, old, advantages = random_case(seed)
        x = inputs_of(torch.tensor(new), old, advantages)
        for mine, ours in zip(open_loss(f"{tmp_path}/own.py:my_clip")(x), open_loss("clip")(x), strict=True):
            assert torch.equal(mine, ours)
    mine = open_estimator(AlgorithmSettings(advantage=f"{tmp_path}/own.py:by_median"))
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.1, 0.1], dtype=torch.float64)
    assert mine.advantages(rewards, [3, 2]).tolist() == [1, -1, 0, 0, 0]
    assert not mine.needs_whole_step


def test_the_page_has_each_field_of_the_inputs_of_a_loss():
    page = (ROOT / "docs" / "use" / "algorithms.md").read_text()
    _, _, table = page.partition("| field of `x` | is |\n")
    rows = table.partition("\n\n")[0].splitlines()
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert {*named} == {*LossInputs._fields}
