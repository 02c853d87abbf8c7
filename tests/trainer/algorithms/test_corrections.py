"""Corrections equal float64 NumPy written from their formulas, and the gradient equals finite differences."""

import math
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.packed import packed, split

from headrace.comm.recipe import AlgorithmSettings, Recipe
from headrace.trainer.algorithms.corrections import correct, pull_to_generator
from headrace.trainer.algorithms.objective import policy_loss
from headrace.trainer.batch import PackedBatch

RNG = np.random.default_rng(7)
LENGTHS = (4, 2, 5, 3)
ENDS = np.cumsum(LENGTHS)
SIZE = int(ENDS[-1])
BEHAVIOUR = -RNG.gamma(2.0, 0.6, SIZE)
PROXIMAL = BEHAVIOUR + RNG.normal(0, 0.6, SIZE)
NEW = PROXIMAL + RNG.normal(0, 0.2, SIZE)
ADVANTAGES = RNG.normal(0, 1, len(LENGTHS))
MASK = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], float)
STALENESS = np.array([2, 2, 2, 1, 0, 0, 3, 3, 1, 0, 0, 0, 0, 0])
LOW, HIGH, CAP = 0.1, 0.15, 1.4
PROXIMALS = ("version", "rollout")
DPPO = AlgorithmSettings(importance_sampling="token_dppo")
SHIFT, PULL = 0.1, 0.01
BOUNDS = ("token_dppo", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def batch(*, is_updated: bool) -> PackedBatch:
    masks = split(MASK.tolist(), LENGTHS)
    found = packed(split(BEHAVIOUR.tolist(), LENGTHS), ADVANTAGES.tolist(), masks=masks, dtype=torch.float64)
    found.staleness, found.is_updated = torch.tensor(STALENESS), is_updated
    found.proximal_logprobs = torch.tensor(PROXIMAL) if is_updated else None
    return found


def settings(proximal: str, bound: str) -> AlgorithmSettings:
    return AlgorithmSettings(
        proximal=proximal,  # pyright: ignore[reportArgumentType]
        importance_sampling=bound,  # pyright: ignore[reportArgumentType]
        clip_low=LOW,
        clip_high=HIGH,
        importance_sampling_cap=CAP,
    )


def formula(new: np.ndarray, frozen: np.ndarray, proximal: str, bound: str, is_updated: bool) -> float:
    """The mean loss over tokens; `frozen` are the log-probs of the policy in training that carry no gradient."""
    total = 0.0
    for begin, end, advantage in zip([0, *ENDS[:-1]], ENDS, ADVANTAGES, strict=True):
        old = [proximal_of(frozen[t], t, proximal, is_updated) for t in range(begin, end)]
        log_weights = {t: old[t - begin] - BEHAVIOUR[t] for t in range(begin, end) if MASK[t]}
        for t, own in log_weights.items():
            by_sequence = bound.startswith("sequence")
            weight = np.exp(sum(log_weights.values()) if by_sequence else own)
            is_kept = 1 / CAP <= weight <= CAP
            if bound == "token_dppo":
                shift = np.exp(old[t - begin]) - np.exp(BEHAVIOUR[t])
                weight = weight * (shift <= SHIFT if advantage > 0 else shift >= -SHIFT)
                total += PULL * (new[t] - BEHAVIOUR[t]) ** 2 * (proximal == "version")
            weight = weight * is_kept if bound.endswith("mask") else min(weight, CAP)
            ratio = np.exp(new[t] - old[t - begin])
            clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
            total += -weight * min(ratio * advantage, clipped * advantage)
    return total / MASK.sum()


def proximal_of(logprob: float, t: int, proximal: str, is_updated: bool) -> float:
    if proximal == "rollout":
        return BEHAVIOUR[t]
    return PROXIMAL[t] if is_updated else logprob


@pytest.mark.parametrize(("proximal", "bound", "is_updated"), [*product(PROXIMALS, BOUNDS, (False, True))])
def test_the_corrected_loss_and_its_gradient_follow_the_formula(proximal: str, bound: str, is_updated: bool):
    logprobs = torch.tensor(NEW, requires_grad=True)
    recipe = Recipe(algorithm=settings(proximal, bound))
    terms = policy_loss(
        logprobs,
        torch.zeros_like(logprobs),
        batch(is_updated=is_updated),
        recipe.algorithm,
        recipe.sampling,
    )
    loss = terms.loss / terms.weight
    assert loss.item() == pytest.approx(formula(NEW, NEW, proximal, bound, is_updated), abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    step = 1e-6
    differences = [
        (
            formula(NEW + step * unit, NEW, proximal, bound, is_updated)
            - formula(NEW - step * unit, NEW, proximal, bound, is_updated)
        )
        / (2 * step)
        for unit in np.eye(SIZE)
    ]
    assert gradient.tolist() == pytest.approx(differences, abs=1e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_at_equal_version_and_equal_numbers_no_correction_changes_anything(bound: str):
    fresh = batch(is_updated=False)
    fresh.staleness = torch.zeros_like(fresh.staleness)
    for proximal in PROXIMALS:
        found = correct(fresh.rollout_logprobs, fresh, settings(proximal, bound))
        assert torch.equal(found.proximal_logprobs, fresh.rollout_logprobs)
        assert found.weight.eq(1).all() and not found.is_limited.any()


def test_with_one_update_for_each_version_the_ratio_in_the_clip_is_exactly_one():
    logprobs = torch.tensor(NEW, requires_grad=True)
    found = correct(logprobs, batch(is_updated=False), settings("version", "token_truncate"))
    assert torch.equal((logprobs - found.proximal_logprobs).exp(), torch.ones(SIZE, dtype=torch.float64))
    assert not any(each.requires_grad for each in found)


def test_weights_of_numbers_far_apart_are_finite_and_bounded():
    for bound in BOUNDS:
        found = correct(torch.tensor(BEHAVIOUR + 500.0), batch(is_updated=False), settings("version", bound))
        assert found.weight.isfinite().all() and found.weight.max() <= CAP


def test_a_token_stops_to_push_once_its_probability_has_moved_as_far_as_it_may():
    stale = packed([[math.log(p) for p in (0.5, 0.5, 0.5, 0.01)]] * 2, [1.0, -1.0])
    moved = torch.tensor([0.59, 0.61, 0.2, 0.09, 0.41, 0.39, 0.8, 0.0001])
    found = correct(moved.log(), stale, DPPO)
    assert found.weight.tolist() == pytest.approx([1.18, 0.0, 0.4, 2.0, 0.82, 0.0, 1.6, 0.01], rel=1e-5)
    assert found.is_limited.tolist() == [False, True, False, True, False, True, False, False]


def test_the_pull_to_the_generator_leaves_tokens_without_an_advantage_alone():
    stale = packed([[-1.0] * 2] * 3, [1.0, 0.0, -1.0])
    pull = pull_to_generator(stale.rollout_logprobs + torch.tensor([0.5, 0.0] * 3), stale, DPPO)
    assert pull is not None
    assert pull.tolist() == pytest.approx([PULL * 0.25, 0, 0, 0, PULL * 0.25, 0])


@pytest.mark.parametrize("settings", [{"proximal": "rollout"}, {"importance_sampling": "token_truncate"}])
def test_other_corrections_have_no_pull(settings: dict[str, Any]):
    stale = packed([[-1.0] * 2], [1.0])
    algorithm = msgspec.structs.replace(DPPO, **settings)
    assert pull_to_generator(stale.rollout_logprobs, stale, algorithm) is None
