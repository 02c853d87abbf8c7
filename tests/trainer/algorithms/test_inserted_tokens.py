"""Tokens that an environment inserted change nothing: every figure is that of the drawn tokens alone."""

import numpy as np
import pytest
import torch

from headrace.comm.recipe import AlgorithmSettings, Recipe
from headrace.trainer.algorithms.gae import generalized_advantages
from headrace.trainer.algorithms.objective import policy_loss
from headrace.trainer.batch import PackedBatch, Trajectory, pack
from headrace.trainer.learners.advantages import kl_penalty
from headrace.trainer.step_metrics import StepMetrics

LENGTHS = (9, 4, 7)
INSERTED = (((2, 5), (7, 8)), ((0, 2),), ())
"""Spans of each response."""
SETTINGS = [
    {"loss": loss, "loss_agg": loss_agg, "importance_sampling": correction, "proximal": proximal, "kl_coef": 0.1}
    for loss, loss_agg, correction, proximal in [
        ("clip", "token-mean", "token_truncate", "version"),
        ("clip", "seq-mean-token-mean", "sequence_truncate", "rollout"),
        ("gspo", "seq-mean-token-mean", "sequence_mask", "rollout"),
        ("gspo", "token-mean", "token_dppo", "version"),
        ("cispo", "seq-mean-token-sum", "token_mask", "version"),
        ("reinforce", "seq-mean-token-sum-norm", "token_truncate", "version"),
    ]
]


def masks() -> list[np.ndarray]:
    found = [np.ones(length, np.uint8) for length in LENGTHS]
    for mask, spans in zip(found, INSERTED, strict=True):
        for start, stop in spans:
            mask[start:stop] = 0
    return found


def batches() -> tuple[PackedBatch, PackedBatch]:
    """The same responses with inserted tokens, of mask 0, and without them."""
    random = np.random.default_rng(3)
    whole: list[Trajectory] = []
    for mask in masks():
        numbers = {
            name: (random.normal(-2, 1, len(mask)) * mask).astype(np.float32)
            for name in ("rollout_logprobs", "ref_logprobs", "advantages")
        }
        versions = random.integers(3, 6, len(mask)).astype(np.int32)
        tokens = np.zeros(len(mask), np.int32)
        whole.append(Trajectory(np.zeros(2, np.int32), tokens, loss_mask=mask, version=3, versions=versions, **numbers))
    kept = []
    for row in whole:
        of = row.loss_mask != 0
        numbers = {name: getattr(row, name)[of] for name in ("rollout_logprobs", "ref_logprobs", "advantages")}
        assert row.versions is not None
        tokens, versions = row.response_ids[of], row.versions[of]
        kept.append(
            Trajectory(row.prompt_ids, tokens, loss_mask=row.loss_mask[of], version=3, versions=versions, **numbers)
        )
    cpu = torch.device("cpu")
    return pack(whole, 5, cpu), pack(kept, 5, cpu)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['loss']}-{s['loss_agg']}-{s['importance_sampling']}")
def test_loss_gradient_and_metrics_are_those_of_the_drawn_tokens_alone(settings: dict):
    whole, kept = batches()
    drawn = whole.mask > 0
    logprobs = torch.randn(len(drawn), generator=torch.Generator().manual_seed(1)) - 2
    logprobs[~drawn] = -300.0  # a tool's text may be as unlikely as can be
    recipe = Recipe(algorithm=AlgorithmSettings(entropy_coef=0.01, **settings))
    found, gradients, metrics = [], [], []
    for batch, values in ((whole, logprobs), (kept, logprobs[drawn])):
        values = values.clone().requires_grad_()
        terms = policy_loss(values, -values, batch, recipe.algorithm, recipe.sampling)
        terms.loss.backward()
        assert values.grad is not None
        gradients.append(values.grad)
        found.append(torch.stack([term.detach().double() for term in terms]))
        stats = StepMetrics()
        stats.add_batch(batch, values.detach(), terms)
        metrics.append(stats._sums)  # pyright: ignore[reportPrivateUsage]
    assert torch.allclose(found[0], found[1], rtol=1e-5)
    assert torch.allclose(gradients[0][drawn], gradients[1], rtol=1e-5) and not gradients[0][~drawn].any()
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


def test_gae_goes_from_a_turns_last_token_to_the_first_of_the_next_turn():
    mask = masks()[0] != 0
    values = np.linspace(0, 1, len(mask))
    rewards = np.zeros(mask.sum())
    rewards[-1] = 1.0
    (advantages,) = generalized_advantages([rewards], [values[mask]], gamma=0.9, lam=0.0)
    own = np.flatnonzero(mask)
    for place, after, advantage in zip(own, own[1:], advantages, strict=False):
        assert advantage == pytest.approx(0.9 * values[after] - values[place])


def test_a_kl_penalty_in_the_reward_leaves_out_inserted_tokens():
    mask = masks()[0]
    tokens = np.zeros(len(mask), np.int32)
    row = Trajectory(tokens, tokens, np.zeros(len(mask), np.float32), loss_mask=mask, version=0)
    row.ref_logprobs = np.full(len(mask), -3.0, np.float32)
    penalty = kl_penalty(row, AlgorithmSettings(kl_coef=0.5, kl_in="reward", kl_estimator="k1"))
    assert penalty.tolist() == pytest.approx((1.5 * mask).tolist())
