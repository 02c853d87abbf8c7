"""Advantages follow the formulas of their papers, and equal rewards have none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import SettingError
from headrace.comm.recipe import AlgorithmSettings
from headrace.trainer.algorithms.advantages import open_estimator

REWARDS, SIZES = np.array([1.0, 0.0, 3.0, 0.5, -1.0, 7.0, 2.0, 2.0, 2.0]), (3, 2, 1, 3)
GROUPS = np.split(REWARDS, np.cumsum(SIZES)[:-1])
"""Groups of three, two, one, and three equal ones."""


def advantages_of(rewards: np.ndarray = REWARDS, sizes: tuple[int, ...] = SIZES, **settings: str) -> np.ndarray:
    estimator = open_estimator(AlgorithmSettings(**settings))  # pyright: ignore[reportArgumentType]
    return estimator.advantages(torch.tensor(rewards), list(sizes)).numpy()


def std_of(group: np.ndarray) -> float:
    return float(group.std(ddof=1)) if len(group) > 1 else 0.0


EXPECTED = {
    ("grpo", "group"): [(g - g.mean()) / (std_of(g) + 1e-4) for g in GROUPS],
    ("grpo", "batch"): [(g - g.mean()) / (REWARDS.std(ddof=1) + 1e-4) for g in GROUPS],
    ("grpo", "none"): [g - g.mean() for g in GROUPS],
    ("rloo", "group"): [
        np.array([r - np.delete(g, i).mean() if len(g) > 1 else 0 for i, r in enumerate(g)]) for g in GROUPS
    ],
    ("reinforce_plus_plus", "group"): GROUPS,
    ("reinforce_plus_plus_baseline", "group"): [g - g.mean() for g in GROUPS],
}


@pytest.mark.parametrize(("advantage", "scale_rewards"), EXPECTED)
def test_an_estimator_follows_its_formula(advantage: str, scale_rewards: str):
    found = advantages_of(advantage=advantage, scale_rewards=scale_rewards)
    assert found == pytest.approx(np.concatenate(EXPECTED[advantage, scale_rewards]), abs=1e-12)


@given(
    reward=st.floats(-1e3, 1e3),
    size=st.integers(1, 9),
    name=st.sampled_from([("grpo", "group"), ("grpo", "batch"), ("grpo", "none"), ("rloo", "group")]),
)
def test_equal_rewards_have_exactly_no_advantage(reward: float, size: int, name: tuple[str, str]):
    advantage, scale_rewards = name
    found = advantages_of(np.full(size, reward), (size,), advantage=advantage, scale_rewards=scale_rewards)
    assert not found.any()


def test_only_some_estimators_wait_for_the_whole_step():
    waiting = {
        (advantage, scale)
        for advantage in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        for scale in ("group", "batch", "none")
        if open_estimator(AlgorithmSettings(advantage=advantage, scale_rewards=scale)).needs_whole_step
    }
    plus_plus = {(f"reinforce_plus_plus{form}", s) for form in ("", "_baseline") for s in ("group", "batch", "none")}
    assert waiting == plus_plus | {("grpo", "batch")}


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_an_estimator_of_groups_gives_a_group_the_same_numbers_alone(name: str):
    whole = advantages_of(advantage=name)
    alone = [advantages_of(group, (len(group),), advantage=name) for group in GROUPS]
    assert np.array_equal(whole, np.concatenate(alone))


def test_a_users_estimator_gets_the_whole_step_unless_it_says_otherwise(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def best(rewards, group_sizes):\n"
        "    return (rewards == rewards.max()).to(rewards.dtype)\n"
        "def first(rewards, group_sizes):\n"
        "    return rewards\n"
        "first.needs_whole_step = False\n"
    )
    best, first = (
        open_estimator(AlgorithmSettings(advantage=f"{tmp_path}/mine.py:{name}")) for name in ("best", "first")
    )
    assert best.needs_whole_step and not first.needs_whole_step
    assert best.advantages(torch.tensor([1.0, 3.0]), [2]).tolist() == [0.0, 1.0]


def test_a_users_estimator_that_returns_another_number_of_advantages_names_its_setting(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def wrong(rewards, group_sizes):\n    return rewards[:1]\n")
    estimator = open_estimator(AlgorithmSettings(advantage=f"{tmp_path}/mine.py:wrong"))
    with pytest.raises(SettingError, match=r"algorithm.advantage: .* shape \[1\] for 2 rewards"):
        estimator.advantages(torch.tensor([1.0, 3.0]), [2])
