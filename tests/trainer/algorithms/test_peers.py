"""Losses, gradients and advantages equal those of TRL's and verl's own code (tests/support/peer_numbers.py wrote the numbers)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packed import packed, split

from headrace.comm.recipe import AlgorithmSettings, Recipe, SamplingSettings
from headrace.trainer.algorithms.advantages import open_estimator
from headrace.trainer.algorithms.kl import KL_ESTIMATORS
from headrace.trainer.algorithms.objective import policy_loss
from headrace.trainer.algorithms.reward_shaping import kl_to_go
from headrace.trainer.algorithms.whitening import whitened

PEERS: dict[str, Any] = json.loads((Path(__file__).parent / "peer_numbers.json").read_text())
INPUTS, LENGTHS = PEERS["inputs"], PEERS["lengths"]
TOLERANCE = 1e-7
"""verl adds 1e-8 to a length; TRL has parts of a standard deviation in float32. The others agree to 1e-12."""


def name_of(case: dict[str, Any]) -> str:
    return "-".join([case["peer"], *map(str, case.get("options", case["settings"]).values())])


def column(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float64)


@pytest.mark.parametrize("case", PEERS["losses"], ids=name_of)
def test_a_loss_and_its_gradient_equal_the_peers(case: dict[str, Any]):
    settings = AlgorithmSettings(proximal="rollout", **case["settings"])
    recipe = Recipe(algorithm=settings, sampling=SamplingSettings(max_new_tokens=PEERS["max_new_tokens"]))
    batch = packed(
        split(INPUTS["old_logprobs"], LENGTHS),
        INPUTS["advantages"],
        ref_logprobs=split(INPUTS["ref_logprobs"], LENGTHS) if settings.kl_coef else None,
        dtype=torch.float64,
    )
    logprobs = column("logprobs").requires_grad_()
    terms = policy_loss(logprobs, column("entropy"), batch, recipe.algorithm, recipe.sampling)
    loss = terms.loss / terms.weight
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    assert gradient.tolist() == pytest.approx(case["gradient"], abs=TOLERANCE)


@pytest.mark.parametrize("name", PEERS["kl"])
def test_kl_estimates_equal_verls(name: str):
    found = KL_ESTIMATORS[name](column("logprobs"), column("ref_logprobs"))
    assert found.tolist() == pytest.approx(PEERS["kl"][name], abs=TOLERANCE)


@pytest.mark.parametrize("case", PEERS["advantages"], ids=name_of)
def test_advantages_equal_the_peers(case: dict[str, Any]):
    settings = AlgorithmSettings(**case["settings"])
    estimator = open_estimator(settings)
    kl = KL_ESTIMATORS[settings.kl_estimator](column("old_logprobs"), column("ref_logprobs")) * settings.kl_coef
    penalties = [np.array(part) for part in split(kl.tolist(), LENGTHS)]
    rewards = column("rewards")
    if not estimator.kl_to_go:
        rewards = rewards - torch.tensor([part.sum() for part in penalties])
    of_response = estimator.advantages(rewards, [PEERS["group_size"]] * 2).tolist()
    if "advantages" in case:
        assert of_response == pytest.approx(case["advantages"], abs=TOLERANCE)
        return
    tokens = [np.full(n, value) for n, value in zip(LENGTHS, of_response, strict=True)]
    if estimator.kl_to_go:
        tokens = [part - kl_to_go(penalty) for part, penalty in zip(tokens, penalties, strict=True)]
    if estimator.whitens:
        tokens = whitened(tokens, [np.ones(n) for n in LENGTHS], lambda values: values)
    assert np.concatenate(tokens) == pytest.approx(case["token_advantages"], abs=TOLERANCE)
