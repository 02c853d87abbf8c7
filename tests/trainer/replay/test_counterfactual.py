"""The gradient of a variant is the one that a run with its settings would have had on the same weights and rows."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.actors import ALONE, actor_of, batch_of, on_two_ranks, recipe_of, train, with_equal_rewards
from support.policies import tiny_policy
from support.trained_run import stale_batch
from transformers import AutoModelForCausalLM

from headrace.comm.recipe import AlgorithmSettings, Recipe
from headrace.launch.config.load import changed_recipe
from headrace.relay.queue.batch import Batch
from headrace.trainer.learners.optimizer import Update
from headrace.trainer.replay.comparison import Figures
from headrace.trainer.replay.counterfactual import CounterfactualActor, TalliedMetrics, Tally
from headrace.trainer.step_metrics import StepMetrics

VARIANTS = [
    "algorithm.loss=gspo algorithm.proximal=rollout",
    "algorithm.loss=cispo algorithm.proximal=rollout",
    "algorithm.loss=reinforce algorithm.importance_sampling=token_mask",
    "algorithm.importance_sampling=sequence_truncate algorithm.importance_sampling_cap=1.5",
    "algorithm.importance_sampling=token_truncate",
    "algorithm.advantage=rloo",
    "algorithm.advantage=reinforce_plus_plus_baseline",
    "algorithm.scale_rewards=batch algorithm.loss_agg=seq-mean-token-mean",
    "algorithm.mask_truncated=true algorithm.overlong_buffer=8",
    "algorithm.entropy_coef=0.1",
]
TWO_GROUPS: dict[str, Any] = {"batch__prompts_per_step": 2, "sampling__max_new_tokens": 16}


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def batches_of(step: int = 0) -> list[Batch]:
    return [stale_batch(step, number, total=2) for number in range(2)]


def figures_of(
    recipe: Recipe, batches: Sequence[Batch], *variants: AlgorithmSettings, version: int = 0
) -> tuple[dict[str, Any], list[Figures]]:
    """Metrics of a step, and figures by its own loss, without its norm and cosine, and by each variant."""
    torch.manual_seed(0)
    actor = CounterfactualActor(recipe, ALONE, variants)
    actor.state.step = version
    tally = Tally(recipe.algorithm)
    stats = TalliedMetrics(tally)
    actor.begin(batches, variants)
    for batch in batches:
        actor.accumulate(batch, stats)
    metrics = {**actor.step(stats), **stats.metrics(version)}
    return metrics, [tally.figures(ALONE), *actor.figures()]


def gradient_of(recipe: Recipe, batches: Sequence[Batch], monkeypatch: pytest.MonkeyPatch, version: int) -> np.ndarray:
    """The gradient, in one vector, of a run with this recipe."""
    actor = actor_of(recipe)
    actor.state.step = version
    found: list[np.ndarray] = []

    def update(scale: float, lr: float, *, is_sound: bool = True) -> Any:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in actor.policy.parameters()]
        found.append(np.concatenate([gradient.double().flatten().numpy() for gradient in gradients]) * scale)
        return Update(grad_norm=0.0, is_applied=True)

    monkeypatch.setattr(actor.updater, "update", update)
    train(actor, list(batches))
    (gradient,) = found
    return gradient


@pytest.mark.parametrize("words", VARIANTS)
def test_a_variant_has_the_gradient_of_a_run_with_its_settings(policy_dir: Path, words: str, monkeypatch):
    recipe = recipe_of(policy_dir, **TWO_GROUPS)
    other = changed_recipe(recipe, words.split())
    metrics, (_, figures) = figures_of(recipe, batches_of(3), other.algorithm, version=3)
    ours, theirs = (gradient_of(each, batches_of(3), monkeypatch, 3) for each in (recipe, other))
    assert metrics["actor/grad_norm"] == pytest.approx(np.linalg.norm(ours), rel=1e-5)
    assert figures.grad_norm == pytest.approx(np.linalg.norm(theirs), rel=1e-5)
    cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert figures.cosine == pytest.approx(cosine, abs=1e-9)
    assert abs(figures.cosine) < 1 - 1e-6, "the variant is another loss"


@pytest.mark.parametrize("words", VARIANTS[:3])
def test_a_variant_has_the_norm_and_the_clipped_share_of_the_first_step_of_a_run_bit_for_bit(policy_dir: Path, words):
    recipe = recipe_of(policy_dir, **TWO_GROUPS)
    other = changed_recipe(recipe, words.split())
    actor = actor_of(other)
    run = train(actor, batches_of())
    _, (_, figures) = figures_of(recipe, batches_of(), other.algorithm)
    assert (figures.grad_norm, figures.clipped) == (run["actor/grad_norm"], run["actor/pg_clipfrac"])


SEVERAL = {"batch__updates_per_version": 2, "batch__passes": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        SEVERAL,
        SEVERAL | {"algorithm__proximal": "rollout"},
        SEVERAL | {"algorithm__advantage": "gae", "algorithm__lam": 0.9},
        {"algorithm__advantage": "reinforce_plus_plus_baseline", "algorithm__loss": "gspo"},
        {"lora__rank": 2},
    ],
    ids=["grpo", "updates", "rollout", "gae", "whole", "lora"],
)
def test_the_run_s_own_settings_as_a_variant_have_its_very_gradient_and_change_nothing(policy_dir: Path, settings):
    recipe = recipe_of(policy_dir, **TWO_GROUPS, **settings)
    batches = batches_of(2)
    if "algorithm__advantage" not in settings:  # else equal rewards have a gradient, too
        batches[1] = with_equal_rewards(batches[1], num_forward=2)
    metrics, (own, again) = figures_of(recipe, batches, recipe.algorithm, version=2)
    assert again.cosine == 1.0
    assert again.grad_norm == metrics["actor/grad_norm"] > 0
    assert again[1:4] == own[1:4]
    actor = actor_of(recipe)
    actor.state.step = 2
    plain = train(actor, batches)
    timeless = [{name: value for name, value in each.items() if "timing" not in name} for each in (metrics, plain)]
    assert repr(timeless[0]) == repr(timeless[1])


def test_a_variant_may_compare_with_the_version_where_the_run_compared_with_the_generator(policy_dir: Path):
    """Its proximal log-probs are those before the step's first update, which the run itself does not need."""
    recipe = recipe_of(policy_dir, **TWO_GROUPS, **SEVERAL, algorithm__proximal="rollout", optimizer__lr=0)
    decoupled = changed_recipe(recipe, ["algorithm.proximal=version"])
    _, (_, figures) = figures_of(recipe, batches_of(), decoupled.algorithm)
    run = train(actor_of(decoupled), batches_of())
    assert figures.grad_norm == run["actor/grad_norm"]
    assert figures.clipped == run["actor/pg_clipfrac"] == 0, "without a step the ratio to the version is 1"


def test_the_figures_are_those_of_their_formulas_in_float64(policy_dir: Path):
    """w is q / b cut at the cap, or with the generator as the proximal policy p / b where the clip lets it through."""
    recipe = recipe_of(policy_dir, **TWO_GROUPS, algorithm__importance_sampling_cap=1.3)
    clipped = changed_recipe(recipe, ["algorithm.proximal=rollout"])
    batches = batches_of(2)
    batches[1] = with_equal_rewards(batches[1], num_forward=2)
    _, (own, other) = figures_of(recipe, batches, clipped.algorithm, version=2)
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float64)
    ratios: list[np.ndarray] = []
    advantages: list[np.ndarray] = []
    for batch in batches:
        (group,) = batch.row_batch.groups
        rewards = np.array(group.rewards)
        for reward, row in zip(rewards, group.rows(), strict=True):
            columns = batch.columns[row.key]
            ids = torch.tensor(np.concatenate([columns["prompt_ids"], columns["response_ids"]]), dtype=torch.long)
            with torch.no_grad():
                logits = model(ids[None]).logits[0]
            drawn = logits.log_softmax(-1)[3:-1].gather(1, ids[4:, None])[:, 0].numpy()
            ratios.append(np.exp(drawn - columns["rollout_logprobs"].astype(np.float64)))
            advantages.append(np.full(len(drawn), reward - rewards.mean() if np.ptp(rewards) else 0.0))
    r = np.concatenate(ratios)
    a = np.concatenate(advantages)
    pushes = a != 0
    truncated = np.minimum(r, 1.3)[pushes]
    is_stopped = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
    through = np.where(is_stopped, 0, r)[pushes]
    for figures, weights in ((own, truncated), (other, through)):
        assert figures.ess == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()), rel=1e-4)
    assert own.limited == pytest.approx((r > 1.3).mean()) and own.clipped == 0
    assert other.clipped == pytest.approx(is_stopped.mean()) and other.limited == 0
    assert 0 < own.limited < 1 and 0 < other.clipped < 1 and pushes.sum() < len(r)


def test_a_step_without_any_advantage_has_no_cosine_and_no_sample_size(policy_dir: Path):
    recipe = recipe_of(policy_dir, **TWO_GROUPS)
    batches = [with_equal_rewards(batch, num_forward=2) for batch in batches_of()]
    _, (own, again) = figures_of(recipe, batches, recipe.algorithm)
    assert math.isnan(own.ess) and math.isnan(again.ess) and math.isnan(again.cosine)
    assert again.grad_norm == 0


TWO_RANKS = """
import json
from headrace.launch.config.load import changed_recipe
from headrace.trainer import actor_group
from headrace.trainer.replay.counterfactual import CounterfactualActor
actor_group.wants_one_sum = lambda *_: args[4] == "True"
recipe = recipe_of(args[0], **eval(args[2]))
variants = [changed_recipe(recipe, words.split()).algorithm for words in eval(args[3])]
actor = CounterfactualActor(recipe, group, variants)
batches = [batch_of(0, first=number, total=2, group=group) for number in range(2)]
actor.begin(batches, variants)
stats = StepMetrics()
for batch in batches:
    actor.accumulate(batch, stats)
actor.step(stats)
figures = actor.figures()
if group.is_lead:
    Path(args[1]).write_text(json.dumps(figures))
"""


@pytest.mark.parametrize("sums_once", [False, True])
def test_two_ranks_find_the_figures_of_one(policy_dir: Path, tmp_path: Path, sums_once: bool):
    words = [*VARIANTS[:2], VARIANTS[6], "algorithm.clip_low=0.2"]
    on_two_ranks(tmp_path, TWO_RANKS, policy_dir, tmp_path / "figures", repr(TWO_GROUPS), repr(words), sums_once)
    found = [Figures(*each) for each in json.loads((tmp_path / "figures").read_text())]
    recipe = recipe_of(policy_dir, **TWO_GROUPS)
    batches = [batch_of(0, first=number, total=2) for number in range(2)]
    _, (_, *alone) = figures_of(recipe, batches, *(changed_recipe(recipe, each.split()).algorithm for each in words))
    for one, other in zip(found, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert found[-1].cosine == 1.0, "the run's own settings"


def test_without_variants_an_actor_takes_the_steps_of_a_run(policy_dir: Path):
    recipe = recipe_of(policy_dir, **TWO_GROUPS)
    actor = CounterfactualActor(recipe, ALONE, [])
    actor.begin(batches_of(), [])
    stats = StepMetrics()
    for batch in batches_of():
        actor.accumulate(batch, stats)
    assert actor.step(stats)["actor/grad_norm"] == train(actor_of(recipe), batches_of())["actor/grad_norm"]
    assert actor.figures() == []
