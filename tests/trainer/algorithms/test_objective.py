"""The loss of a step is its formula over whole responses, and does not depend on how they are split over micro-batches."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support.packed import joined, packed, split

from headrace.comm.messages import GroupId
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import AlgorithmSettings, Recipe, SamplingSettings
from headrace.comm.recipe.queue import TaskSettings
from headrace.trainer.algorithms.losses import LOSSES
from headrace.trainer.algorithms.objective import LossTerms, has_gradient, policy_loss

LENGTHS, MAX_NEW_TOKENS = (5, 2, 4, 1, 3, 6), 8
KL_COEF, ENTROPY_COEF = 0.07, 0.03
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
RNG = np.random.default_rng(3)
OLD = -RNG.gamma(2.0, 0.6, sum(LENGTHS))
NEW, REF = (OLD + RNG.normal(0, 0.3, len(OLD)) for _ in range(2))
ENTROPY, ADVANTAGES = RNG.gamma(2.0, 0.5, len(OLD)), RNG.normal(0, 1, len(LENGTHS))
MASK = (RNG.random(len(OLD)) > 0.3).astype(float)
MASK[5:7] = 0  # a response without loss


def by_response(values: np.ndarray) -> list[list[float]]:
    return split(values.tolist(), LENGTHS)


def recipe_of(**settings: Any) -> Recipe:
    algorithm = AlgorithmSettings(proximal="rollout", **settings)
    return Recipe(algorithm=algorithm, sampling=SamplingSettings(max_new_tokens=MAX_NEW_TOKENS))


def formula(loss_agg: str, new: np.ndarray, entropy: np.ndarray) -> float:
    """The clipped surrogate with k3 and entropy, aggregated response by response."""
    ratio, to_reference = np.exp(new - OLD), np.exp(REF - new)
    advantages = np.repeat(ADVANTAGES, LENGTHS)
    tokens = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    tokens += KL_COEF * (to_reference - 1 - np.log(to_reference)) - ENTROPY_COEF * entropy
    kept = [
        np.array(row)[np.array(mask) == 1] for row, mask in zip(by_response(tokens), by_response(MASK), strict=True)
    ]
    kept = [row for row in kept if len(row)]
    return {
        "token-mean": lambda: np.concatenate(kept).mean(),
        "seq-mean-token-mean": lambda: np.mean([row.mean() for row in kept]),
        "seq-mean-token-sum": lambda: np.mean([row.sum() for row in kept]),
        "seq-mean-token-sum-norm": lambda: np.mean([row.sum() / MAX_NEW_TOKENS for row in kept]),
    }[loss_agg]()


def terms_of(recipe: Recipe, logprobs: torch.Tensor, entropy: torch.Tensor, responses: list[int]) -> LossTerms:
    """Of a micro-batch of some of the responses."""
    ends = np.cumsum(LENGTHS)
    tokens = np.concatenate([np.arange(ends[i] - LENGTHS[i], ends[i]) for i in responses])
    batch = packed(
        [by_response(OLD)[i] for i in responses],
        [ADVANTAGES[i] for i in responses],
        masks=[by_response(MASK)[i] for i in responses],
        ref_logprobs=[by_response(REF)[i] for i in responses],
        dtype=torch.float64,
    )
    return policy_loss(logprobs[tokens], entropy[tokens], batch, recipe.algorithm, recipe.sampling)


def step_of(recipe: Recipe, parts: list[list[int]]) -> tuple[float, list[float]]:
    """Loss and gradient of the log-probs, accumulated over micro-batches and divided at the end."""
    logprobs, entropy = (torch.tensor(values, requires_grad=True) for values in (NEW, ENTROPY))
    terms = [terms_of(recipe, logprobs, entropy, part) for part in parts]
    for each in terms:
        each.loss.backward()
    weight = sum(each.weight.item() for each in terms)
    assert logprobs.grad is not None
    return sum(each.loss.item() for each in terms) / weight, (logprobs.grad / weight).tolist()


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_the_loss_and_both_gradients_follow_the_formula(loss_agg: str):
    recipe = recipe_of(loss_agg=loss_agg, kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF)
    logprobs, entropy = (torch.tensor(values, requires_grad=True) for values in (NEW, ENTROPY))
    terms = terms_of(recipe, logprobs, entropy, list(range(len(LENGTHS))))
    loss = terms.loss / terms.weight
    assert loss.item() == pytest.approx(formula(loss_agg, NEW, ENTROPY), abs=1e-12)
    gradients = torch.autograd.grad(loss, (logprobs, entropy))
    for token, (gradient, column) in itertools.product(range(len(NEW)), enumerate(gradients)):
        step = np.zeros((2, len(NEW)))
        step[gradient, token] = 1e-6
        above, below = (formula(loss_agg, NEW + s[0], ENTROPY + s[1]) for s in (step, -step))
        assert column[token].item() == pytest.approx((above - below) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_split_over_micro_batches_gives_the_same_loss_and_gradient(loss: str, loss_agg: str):
    recipe = recipe_of(loss=loss, loss_agg=loss_agg, kl_coef=KL_COEF, clip_dual=3.0)
    whole = step_of(recipe, [[0, 1, 2, 3, 4, 5]])
    for parts in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [1], [3, 2, 4]]):
        value, gradient = step_of(recipe, parts)
        assert value == pytest.approx(whole[0], abs=1e-12)
        assert gradient == pytest.approx(whole[1], abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_without_loss_change_nothing(loss: str):
    terms = []
    for hidden in (0.0, 5.0):
        batch = packed([[-1.0, -2.0 - hidden], [-0.5]], [1.0, -1.0], masks=[[1, 0], [1]], dtype=torch.float64)
        logprobs = joined([[-1.1, -2.5 + hidden], [-0.7]])
        terms.append(policy_loss(logprobs, torch.ones(3), batch, recipe_of(loss=loss).algorithm, SamplingSettings()))
    for name, value in terms[0]._asdict().items():
        assert torch.equal(value, terms[1]._asdict()[name]), name


def test_a_kl_term_in_the_reward_is_measured_and_not_in_the_loss():
    inside, outside = (
        terms_of(recipe_of(kl_coef=KL_COEF, kl_in=place), torch.tensor(NEW), torch.tensor(ENTROPY), [0, 1, 2])
        for place in ("loss", "reward")
    )
    assert inside.kl == outside.kl != 0
    assert outside.loss == outside.pg_loss == inside.pg_loss != inside.loss


def test_without_a_bonus_the_entropy_has_no_gradient_to_compute():
    entropy = torch.tensor(ENTROPY, requires_grad=True)
    for coefficient, is_used in ((0.0, False), (ENTROPY_COEF, True)):
        logprobs = torch.tensor(NEW, requires_grad=True)
        terms = terms_of(recipe_of(entropy_coef=coefficient), logprobs, entropy, [0, 2])
        _, gradient = torch.autograd.grad(terms.loss, (logprobs, entropy), allow_unused=True)
        assert (gradient is not None) == is_used


def group_of(*rewards: float) -> GroupRef:
    n = len(rewards)
    return GroupRef(GroupId(0, 0), list(range(n)), [0] * n, [[]] * n, [0] * n, [9] * n, list(rewards))


def test_a_group_with_equal_rewards_has_no_gradient():
    assert not has_gradient(AlgorithmSettings(), (), group_of(0.3, 0.3, 0.3))
    assert has_gradient(AlgorithmSettings(), (), group_of(0.3, 0.3, 0.4))


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_coef": 0.01},
        {"kl_coef": 0.01},
        {"kl_coef": 0.01, "kl_in": "reward"},
        {"router_aux_coef": 0.01},
        {"loss": "mine.py:loss"},
        {"overlong_buffer": 4},
        {"advantage": "gae"},
        {"advantage": "reinforce_plus_plus"},
        {"advantage": "reinforce_plus_plus_baseline"},
    ],
    ids=str,
)
def test_equal_rewards_keep_their_gradient_where_the_loss_has_more_than_their_advantages(settings: dict[str, Any]):
    assert has_gradient(AlgorithmSettings(**settings), (), group_of(0.3, 0.3, 0.3))


def test_equal_rewards_keep_the_gradient_of_advantages_that_a_task_of_the_user_gives():
    tasks = (TaskSettings(name="judge", function="mine.py:judge", needs=("response_ids",), yields=("advantages",)),)
    assert has_gradient(AlgorithmSettings(), tasks, group_of(0.3, 0.3))
