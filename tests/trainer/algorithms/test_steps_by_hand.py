"""The gradient of a step of each algorithm equals its formula, by hand, on a transformers model in float64.

The settings are exactly those of the algorithm's line in docs/use/algorithms.md, and the rows are stale. The ratio of each formula is
to the policy that generated, as in the papers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.actors import actor_of, train
from support.algorithm_steps import ALGORITHMS, algorithm_recipe, batches_of
from support.policies import tiny_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.relay.queue.batch import Batch

MAX_NEW_TOKENS = 256
STALENESS = 3


class Row(NamedTuple):
    """A response by hand: log-probs [R] of the policy in training, of the rollout and of the reference."""

    new: Tensor
    old: Tensor
    ref: Tensor
    reward: float
    group: int


def clipped(ratio: Tensor, advantage: Tensor | float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def centred(rows: list[Row], rewards: list[float], others: bool = False) -> np.ndarray:
    """Reward minus the mean of the group, or of its other members."""
    peers = [
        [
            r
            for other, (peer, r) in enumerate(zip(rows, rewards, strict=True))
            if peer.group == row.group and not (others and other == i)
        ]
        for i, row in enumerate(rows)
    ]
    return np.array([reward - np.mean(group) for reward, group in zip(rewards, peers, strict=True)])


def scaled(rows: list[Row], rewards: list[float]) -> np.ndarray:
    stds = [
        np.std([r for peer, r in zip(rows, rewards, strict=True) if peer.group == row.group], ddof=1) for row in rows
    ]
    return centred(rows, rewards) / (np.array(stds) + 1e-4)


def white(rows: list[Row], tokens: list[Tensor]) -> list[Tensor]:
    every = torch.cat(tokens)
    return [(part - every.mean()) / (every.var() + 1e-8).sqrt() for part in tokens]


def token_mean(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).mean()


def response_mean(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.mean() for part in parts]).mean()


def ratios(rows: list[Row]) -> list[Tensor]:
    return [(row.new - row.old).exp() for row in rows]


def rewards_of(rows: list[Row]) -> list[float]:
    return [row.reward for row in rows]


def grpo(rows: list[Row], **bounds: float) -> list[Tensor]:
    pairs = zip(ratios(rows), scaled(rows, rewards_of(rows)), strict=True)
    return [clipped(ratio, advantage, **bounds) for ratio, advantage in pairs]


def grpo_with_kl(rows: list[Row]) -> Tensor:
    kl = [(row.ref - row.new).exp() - 1 - (row.ref - row.new) for row in rows]
    return response_mean([part + 0.04 * k for part, k in zip(grpo(rows), kl, strict=True)])


def dr_grpo(rows: list[Row]) -> Tensor:
    pairs = zip(ratios(rows), centred(rows, rewards_of(rows)), strict=True)
    return sum(clipped(r, a).sum() for r, a in pairs) / (len(rows) * MAX_NEW_TOKENS)  # pyright: ignore[reportReturnType]


def dapo(rows: list[Row]) -> Tensor:
    """Longest response 14, buffer 8."""
    shaped = [row.reward - min(max(len(row.new) - 6, 0) / 8, 1) for row in rows]
    pairs = zip(ratios(rows), scaled(rows, shaped), strict=True)
    return token_mean([clipped(ratio, advantage, high=0.28) for ratio, advantage in pairs])


def gspo(rows: list[Row]) -> Tensor:
    pairs = zip(rows, scaled(rows, rewards_of(rows)), strict=True)
    return response_mean([clipped((row.new - row.old).mean().exp(), a, 3e-4, 4e-4)[None] for row, a in pairs])


def cispo(rows: list[Row]) -> Tensor:
    triples = zip(rows, ratios(rows), scaled(rows, rewards_of(rows)), strict=True)
    return token_mean([-ratio.detach().clamp(0, 5) * a * row.new for row, ratio, a in triples])


def rloo(rows: list[Row]) -> Tensor:
    shaped = [row.reward - 0.05 * float((row.old - row.ref).sum()) for row in rows]
    pairs = zip(rows, centred(rows, shaped, others=True), strict=True)
    return torch.stack([-a * row.new.sum() for row, a in pairs]).mean()


def reinforce_plus_plus(rows: list[Row]) -> Tensor:
    kl = [0.01 * (row.old - row.ref) for row in rows]
    returns = [row.reward - k.flip(0).cumsum(0).flip(0) for row, k in zip(rows, kl, strict=True)]
    return token_mean([clipped(r, a) for r, a in zip(ratios(rows), white(rows, returns), strict=True)])


def reinforce_plus_plus_baseline(rows: list[Row]) -> Tensor:
    baseline = centred(rows, rewards_of(rows))
    advantages = white(rows, [torch.full_like(row.old, a) for row, a in zip(rows, baseline, strict=True)])
    kl = [0.01 * (row.new - row.ref).square() / 2 for row in rows]
    return token_mean([clipped(r, a) + k for r, a, k in zip(ratios(rows), advantages, kl, strict=True)])


def one_scale(rows: list[Row]) -> Tensor:
    advantages = centred(rows, rewards_of(rows)) / (np.std(rewards_of(rows), ddof=1) + 1e-4)
    return token_mean([clipped(ratio, a) for ratio, a in zip(ratios(rows), advantages, strict=True)])


def ppo(rows: list[Row]) -> Tensor:
    """The critic's values begin at 0, so lambda discounts the reward, which is given at the last token."""
    advantages = [row.reward * 0.95 ** torch.arange(len(row.new) - 1, -1, -1).double() for row in rows]
    return token_mean([clipped(r, a) for r, a in zip(ratios(rows), white(rows, advantages), strict=True)])


def reinforce(rows: list[Row]) -> Tensor:
    return token_mean([-a * row.new for row, a in zip(rows, scaled(rows, rewards_of(rows)), strict=True)])


BY_HAND: dict[str, Callable[[list[Row]], Tensor]] = {
    "GRPO": grpo_with_kl,
    "Dr. GRPO": dr_grpo,
    "DAPO": dapo,
    "BNPO, as TRL's `bnpo`": lambda rows: token_mean(grpo(rows)),
    "GSPO": gspo,
    "CISPO": cispo,
    "RLOO": rloo,
    "REINFORCE++": reinforce_plus_plus,
    "REINFORCE++ with baseline": reinforce_plus_plus_baseline,
    "GRPO, rewards scaled over the whole step": one_scale,
    "REINFORCE": reinforce,
    "PPO": ppo,
}


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def rows_by_hand(model: Any, batch: Batch) -> list[Row]:
    found = []
    for number, group in enumerate(batch.row_batch.groups):
        for ref in group.rows():
            columns = batch.columns[ref.key]
            prompt, response = (torch.tensor(columns[name].astype(int)) for name in ("prompt_ids", "response_ids"))
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            new = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            old = torch.from_numpy(columns["rollout_logprobs"].astype(float))
            reference = columns.get("ref_logprobs", columns["rollout_logprobs"]).astype(float)
            found.append(Row(new, old, torch.from_numpy(reference), ref.reward, number))
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_of_a_step_equals_the_formula_by_hand(policy_dir: Path, name: str):
    recipe = algorithm_recipe(policy_dir, name)
    (batch,) = batches_of(recipe, (5,))
    actor = actor_of(recipe)
    actor.state.step = STALENESS
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float64, attn_implementation="eager")
    loss = BY_HAND[name](rows_by_hand(model, batch))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    metrics = train(actor, [batch])
    assert metrics["staleness/mean"] == STALENESS
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_every_algorithm_of_the_document_is_done_by_hand():
    assert set(ALGORITHMS) - {"all shaping at once"} == set(BY_HAND)
