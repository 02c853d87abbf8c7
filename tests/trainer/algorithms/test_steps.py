"""Every algorithm of docs/use/algorithms.md trains a step, and the step depends neither on arrival nor on the number of ranks."""

import json
from pathlib import Path

import pytest
from support.actors import actor_of, on_two_ranks, recipe_of, train
from support.algorithm_steps import ALGORITHMS, algorithm_recipe, batches_of, step_of, step_with
from support.policies import tiny_policy

from headrace.trainer.step_metrics import StepMetrics


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def test_the_document_lists_the_algorithms():
    assert len(ALGORITHMS) >= 12


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_does_not_depend_on_how_its_groups_arrive(policy_dir: Path, name: str):
    recipe = algorithm_recipe(policy_dir, name)
    whole = step_of(recipe, (5,))
    assert whole["actor/grad_norm"] > 0
    assert step_of(recipe, (1, 1, 2, 1)) == pytest.approx(whole, rel=2e-5, abs=1e-7)


RANKS = """
import json
import pytest
from support.algorithm_steps import *
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
    actor.accumulate(first, StepMetrics())
    assert all(parameter.grad is None for parameter in actor.policy.parameters()) == waits
    actor.discard()
    assert step_of(recipe, (2, 3)) == step_with(actor, recipe, (2, 3))


def test_masked_truncated_responses_add_no_gradient(policy_dir: Path):
    recipe = recipe_of(policy_dir, algorithm__mask_truncated="true", batch__prompts_per_step=5)
    batches = batches_of(recipe, (5,))
    masked = train(actor_of(recipe), batches)
    for columns in batches[0].columns.values():
        if columns["truncated"][0]:
            columns["response_ids"] = columns["response_ids"][::-1].copy()
            columns["rollout_logprobs"] = columns["rollout_logprobs"] - 1
    assert train(actor_of(recipe), batches)["actor/grad_norm"] == pytest.approx(masked["actor/grad_norm"], rel=1e-6)
    kept = train(actor_of(recipe_of(policy_dir, batch__prompts_per_step=5)), batches)
    assert kept["actor/grad_norm"] != pytest.approx(masked["actor/grad_norm"], rel=1e-3)
