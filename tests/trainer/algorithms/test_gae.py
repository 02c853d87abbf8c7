"""Advantages by GAE and the critic's loss follow their formulas."""

import numpy as np
import pytest
import torch

from headrace.trainer.algorithms.gae import generalized_advantages, value_loss

RNG = np.random.default_rng(0)
LENGTHS = (1, 7, 3, 12)
REWARDS = [RNG.normal(size=n) for n in LENGTHS]
VALUES = [RNG.normal(size=n) for n in LENGTHS]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
def test_an_advantage_is_the_discounted_sum_of_the_later_errors_of_the_critic(gamma, lam):
    found = generalized_advantages(REWARDS, VALUES, gamma, lam)
    for rewards, values, advantages in zip(REWARDS, VALUES, found, strict=True):
        after = np.append(values[1:], 0.0)
        errors = rewards + gamma * after - values
        expected = [
            sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))
        ]
        assert advantages == pytest.approx(np.array(expected), rel=1e-12, abs=1e-12)


def test_with_lambda_1_it_is_the_return_less_the_value():
    for rewards, values, advantages in zip(
        REWARDS, VALUES, generalized_advantages(REWARDS, VALUES, 0.97, 1.0), strict=True
    ):
        returns = [sum(0.97 ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
        assert advantages + values == pytest.approx(np.array(returns), rel=1e-12, abs=1e-12)


def test_no_response_and_an_empty_one_have_no_advantages():
    assert generalized_advantages([], [], 1.0, 1.0) == []
    assert [len(a) for a in generalized_advantages([np.zeros(0), np.ones(2)], [np.zeros(0), np.ones(2)], 1.0, 1.0)] == [
        0,
        2,
    ]


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_critics_loss_and_its_gradient_follow_the_formula(clip):
    values, old, returns = (torch.from_numpy(RNG.normal(size=50)) for _ in range(3))
    values.requires_grad_()
    loss, clipped = value_loss(values, old, returns, clip)
    v, o, r = (x.detach().numpy() for x in (values, old, returns))
    free = (v - r) ** 2
    bounded = (np.clip(v, o - clip, o + clip) - r) ** 2 if clip else free
    assert loss.detach().numpy() == pytest.approx(np.maximum(free, bounded) / 2, rel=1e-12)
    assert clipped.tolist() == (bounded > free).tolist()
    assert clipped.any() == bool(clip)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, clip)[0], values)
