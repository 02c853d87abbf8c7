"""Every algorithm of docs/algorithms.md trains a step, and the step depends neither on arrival nor on the number of ranks."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.actors import ALONE, actor_of, batch_of, on_two_ranks, recipe_of, train
from support.policies import tiny_policy
from support.source_tree import ROOT

from headrace.comm.recipe import Recipe
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.learners.builtin import Actor
from headrace.trainer.step_stats import StepStats

ROW = re.compile(r"^\| ([^|]+) \| ((?:`[a-z_]+\.[a-z_]+=[^`]+` ?)+)\| [^|]+ \|$", re.MULTILINE)
ALGORITHMS = {
    name: dict(word.split("=") for word in re.findall(r"`([^`]+)`", words))
    for name, words in ROW.findall((ROOT / "docs" / "algorithms.md").read_text())
}
ALGORITHMS["all shaping at once"] = {
    "algorithm.advantage": "reinforce_plus_plus",
    "algorithm.kl_in": "reward",
    "algorithm.kl_coef": "0.3",
    "algorithm.mask_truncated": "true",
    "algorithm.overlong_buffer": "8",
    "algorithm.clip_dual": "3",
    "algorithm.entropy_coef": "0.01",
}
COMPARED = ("actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "actor/kl_loss", "actor/ppo_kl")


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def algorithm_recipe(policy: Path, name: str) -> Recipe:
    """Responses of the test have up to 12 tokens, so the overlong buffer begins within them."""
    longest = (
        {"sampling.max_new_tokens": 14, "algorithm.overlong_buffer": 8} if "overlong" in str(ALGORITHMS[name]) else {}
    )
    return recipe_of(policy, **(ALGORITHMS[name] | longest))


def batches_of(recipe: Recipe, sizes: tuple[int, ...], group: ActorGroup = ALONE) -> list[Batch]:
    """Five groups of a step in batches of these sizes, with log-probs near those of a random policy."""
    firsts = np.cumsum((0, *sizes[:-1]))
    batches = [batch_of(0, int(first), size, 5, group) for first, size in zip(firsts, sizes, strict=True)]
    for columns in (columns for batch in batches for columns in batch.columns.values()):
        tokens = columns["response_ids"]
        columns["rollout_logprobs"] = (-4.6 + 0.2 * np.sin(tokens)).astype(np.float32)
        if recipe.algorithm.kl_coef:
            columns["ref_logprobs"] = (-4.6 + 0.2 * np.cos(tokens)).astype(np.float32)
    return batches


def step_of(recipe: Recipe, sizes: tuple[int, ...], group: ActorGroup = ALONE) -> dict[str, float]:
    return step_with(actor_of(recipe, group), recipe, sizes, group)


def step_with(actor: Actor, recipe: Recipe, sizes: tuple[int, ...], group: ActorGroup = ALONE) -> dict[str, float]:
    metrics = train(actor, batches_of(recipe, sizes, group))
    return {name: metrics[name] for name in COMPARED}


def test_the_document_lists_the_algorithms():
    assert len(ALGORITHMS) >= 12


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_does_not_depend_on_how_its_groups_arrive(policy_dir: Path, name: str):
    recipe = algorithm_recipe(policy_dir, name)
    whole = step_of(recipe, (5,))
    assert whole["actor/grad_norm"] > 0
    for sizes in ((1, 1, 1, 1, 1), (2, 3)):
        assert step_of(recipe, sizes) == pytest.approx(whole, rel=2e-5, abs=1e-7)


RANKS = """
sys.path.insert(0, str(TESTS / "trainer" / "algorithms"))
from test_steps import *
for name in ALGORITHMS:
    print(name, flush=True)
    recipe = algorithm_recipe(Path(args[0]), name)
    assert step_of(recipe, (2, 3), group) == pytest.approx(json.loads(args[1])[name], rel=2e-5, abs=1e-7), name
"""


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(policy_dir: Path, tmp_path: Path):
    alone = {name: step_of(algorithm_recipe(policy_dir, name), (5,)) for name in ALGORITHMS}
    on_two_ranks(tmp_path, RANKS, policy_dir, json.dumps(alone))


@pytest.mark.parametrize(("name", "waits"), [("GRPO", False), ("RLOO", False), ("REINFORCE++", True)])
def test_only_an_algorithm_of_the_whole_step_waits_for_its_last_group(policy_dir: Path, name: str, waits: bool):
    recipe = algorithm_recipe(policy_dir, name)
    actor, first = actor_of(recipe), batches_of(recipe, (2, 3))[0]
    actor.accumulate(first, StepStats())
    assert all(parameter.grad is None for parameter in actor.policy.parameters()) == waits
    actor.discard()
    assert step_of(recipe, (2, 3)) == step_with(actor, recipe, (2, 3))


def test_masked_truncated_responses_add_no_gradient(policy_dir: Path):
    recipe = recipe_of(policy_dir, algorithm__mask_truncated="true")
    batches = batches_of(recipe, (5,))
    masked = train(actor_of(recipe), batches)
    for columns in batches[0].columns.values():
        if columns["truncated"][0]:
            columns["response_ids"] = columns["response_ids"][::-1].copy()
            columns["rollout_logprobs"] = columns["rollout_logprobs"] - 1
    assert train(actor_of(recipe), batches)["actor/grad_norm"] == pytest.approx(masked["actor/grad_norm"], rel=1e-6)
    kept = train(actor_of(recipe_of(policy_dir)), batches)
    assert kept["actor/grad_norm"] != pytest.approx(masked["actor/grad_norm"], rel=1e-3)
