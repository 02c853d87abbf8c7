"""KL estimates follow their formulas, and their means approach the divergence."""

import numpy as np
import pytest
import torch

from headrace.trainer.algorithms.kl import KL_ESTIMATORS

FORMULAS = {
    "k1": lambda r: -np.log(r),
    "k2": lambda r: np.log(r) ** 2 / 2,
    "k3": lambda r: r - 1 - np.log(r),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_an_estimate_follows_its_formula_and_its_gradient_the_finite_differences(name: str):
    rng = np.random.default_rng(2)
    new, reference = -rng.gamma(2.0, 0.6, 9), -rng.gamma(2.0, 0.6, 9)
    logprobs = torch.tensor(new, requires_grad=True)
    found = KL_ESTIMATORS[name](logprobs, torch.tensor(reference))
    assert found.detach().numpy() == pytest.approx(FORMULAS[name](np.exp(reference - new)), abs=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    above, below = (FORMULAS[name](np.exp(reference - new - step)) for step in (1e-6, -1e-6))
    assert gradient.numpy() == pytest.approx((above - below) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_an_unbiased_estimate_has_the_divergence_as_its_mean(name: str):
    policy, reference = (torch.tensor(p, dtype=torch.float64) for p in ([0.6, 0.3, 0.1], [0.3, 0.3, 0.4]))
    divergence = (policy * (policy / reference).log()).sum()
    estimates = KL_ESTIMATORS[name](policy.log(), reference.log())
    assert (policy * estimates).sum().item() == pytest.approx(divergence.item(), abs=1e-12)
