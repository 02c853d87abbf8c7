"""A step whose shared tokens are computed once is the step of rows alone: each algorithm, adapters, critic, routers, ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from bench.operators import Operators
from support.actors import ALONE, actor_of, on_ranks, recipe_of, train
from support.algorithm_steps import ALGORITHMS, algorithm_recipe, batches_of
from support.float64 import in_float64
from support.policies import tiny_policy
from support.trained_run import trained_run

from headrace.comm.recipe import Recipe
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.algorithms.router_loss import load_balancing_loss
from headrace.trainer.learners import actor as actor_module
from headrace.trainer.learners.actor import Actor
from headrace.trainer.learners.base import Learner
from headrace.trainer.logprobs import longest_in_tree, response_logprobs
from headrace.trainer.policy.model import load_policy
from headrace.trainer.recovery import train_again
from headrace.trainer.replay.pack import opened_pack
from headrace.trainer.replay.replay import NewPack, replay_pack, replay_steps

SMOOTH: dict[str, Any] = {"optimizer.eps": 1.0, "optimizer.lr": 0.5}
"""A large epsilon makes an update smooth in its gradient."""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def groups_with_prompts(recipe: Recipe, group: ActorGroup = ALONE, sizes: tuple[int, ...] = (2, 3)) -> list[Batch]:
    """Batches of so many groups, each whole on one rank. Its rows share a prompt, and two of them the beginning of their response."""
    found: list[Batch] = []
    for batch in batches_of(recipe, sizes, group):
        columns = {key: dict(row) for key, row in batch.columns.items()}
        for ref in batch.row_batch.rows():
            rng = np.random.default_rng(ref.row.prompt)
            row = columns[ref.key]
            row["prompt_ids"] = rng.integers(4, 99, 20).astype(np.int32)
            if ref.row.sample:
                start = rng.integers(4, 99, 5).astype(np.int32)
                row["response_ids"] = np.concatenate([start, row["response_ids"]])[: len(row["response_ids"])]
        mine = [ref for own in batch.row_batch.groups[group.rank :: group.size] for ref in own.rows()]
        found.append(replace(batch, micro_batches=[mine], columns=columns, has_trees=recipe.trainer.prefix_tree))
    return found


def step_of(recipe: Recipe, group: ActorGroup = ALONE, *, is_double: bool = True) -> tuple[Actor, dict[str, Any]]:
    actor = actor_of(recipe, group)
    policies = [actor.policy] + ([] if actor.critic is None else [actor.critic.model.policy])
    if not is_double:
        return actor, train(actor, groups_with_prompts(recipe, group))
    with in_float64(*policies):
        if actor.critic is not None:
            actor.critic.model.double()
        return actor, train(actor, groups_with_prompts(recipe, group))


def assert_same(tree: tuple[Actor, dict[str, Any]], alone: tuple[Actor, dict[str, Any]], bound: float) -> None:
    (ours, metrics), (theirs, expected) = tree, alone
    ratios = metrics.pop("actor/tree_ratio"), expected.pop("actor/tree_ratio")
    assert ratios[0] > 1.2 and ratios[1] == 1.0, ratios
    figures = {name: value for name, value in expected.items() if not name.startswith(("timing_s", "staleness/hist"))}
    assert {name: metrics[name] for name in figures} == pytest.approx(figures, rel=bound, abs=bound)
    assert metrics["actor/grad_norm"] > 0
    for one, other in zip(ours.state.model.parameters(), theirs.state.model.parameters(), strict=True):
        assert (one - other).abs().max() <= bound
    if ours.critic is not None and theirs.critic is not None:
        for one, other in zip(ours.critic.model.parameters(), theirs.critic.model.parameters(), strict=True):
            assert (one - other).abs().max() <= bound


def both_ways(recipe_with: Any, bound: float, *, is_double: bool = True, group: ActorGroup = ALONE) -> None:
    tree, alone = (
        step_of(recipe_with({"trainer.prefix_tree": words}), group, is_double=is_double) for words in ("true", "false")
    )
    assert_same(tree, alone, bound)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_step_of_rows_alone(policy_dir, name):
    both_ways(lambda words: algorithm_recipe(policy_dir, name, **SMOOTH, **words), 1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.importance_sampling": "token_truncate", "algorithm.proximal": "rollout"},
        {"algorithm.importance_sampling": "token_mask"},
        {"algorithm.importance_sampling": "sequence_truncate"},
        {"algorithm.importance_sampling": "sequence_mask", "algorithm.importance_sampling_cap": 1e6},
        {"batch.updates_per_version": 2, "batch.passes": 2},
        {"algorithm.entropy_coef": 0.1, "sampling.temperature": 0.7},
    ],
    ids=str,
)
def test_every_correction_and_update_scheme_has_the_step_of_rows_alone(policy_dir, settings):
    settings = SMOOTH | {"batch.prompts_per_step": 5} | settings
    both_ways(lambda words: recipe_of(policy_dir, **(settings | words)), 1e-10)


def test_a_critic_has_the_step_of_rows_alone(policy_dir):
    settings = SMOOTH | {"batch.prompts_per_step": 5, "algorithm.advantage": "gae", "critic.lr": 0.3}
    both_ways(lambda words: recipe_of(policy_dir, **(settings | words)), 1e-10)


def test_an_adapter_has_the_step_of_rows_alone(policy_dir):
    settings = SMOOTH | {"batch.prompts_per_step": 5, "lora.rank": 4}
    both_ways(lambda words: recipe_of(policy_dir, **(settings | words)), 2e-6, is_double=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_routers_loss_counts_a_shared_token_as_often_as_it_is_in_rows(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    settings = SMOOTH | {"batch.prompts_per_step": 5, "algorithm.router_aux_coef": 0.5}
    both_ways(lambda words: recipe_of(path, **(settings | words)), 1e-10)


def test_the_routers_loss_keeps_no_more_logits_than_there_are_computed_tokens(tmp_path, monkeypatch):
    """The rows of a micro-batch may have eight times as many tokens, and the memory plan does not include those."""
    sizes: list[list[int]] = []

    def loss(logits: list[torch.Tensor], top_k: int, weights: torch.Tensor) -> torch.Tensor:
        sizes.append([*(len(layer) for layer in logits), len(weights)])
        return load_balancing_loss(logits, top_k, weights)

    monkeypatch.setattr(actor_module, "load_balancing_loss", loss)
    path = tiny_policy(tmp_path, "qwen3_moe")
    recipe = recipe_of(path, **{"batch.prompts_per_step": 5, "algorithm.router_aux_coef": 0.5})
    metrics = train(actor_of(recipe), batches := groups_with_prompts(recipe))
    assert all(len({*each}) == 1 for each in sizes)
    num_tokens = sum(ref.num_tokens + 16 for batch in batches for ref in batch.rows)
    assert sum(each[0] for each in sizes) == round(num_tokens / metrics["actor/tree_ratio"]) < num_tokens


@pytest.mark.parametrize("settings", [{}, {"trainer.activation_checkpointing": "true"}], ids=str)
def test_a_step_in_float32_is_that_of_rows_alone_within_rounding(policy_dir, settings):
    settings = SMOOTH | {"batch.prompts_per_step": 5} | settings
    both_ways(lambda words: recipe_of(policy_dir, **(settings | words)), 2e-6, is_double=False)


def test_log_probs_without_a_gradient_are_those_of_rows_alone(policy_dir):
    found: list[np.ndarray] = []
    for words in ("true", "false"):
        recipe = recipe_of(policy_dir, **{"trainer.prefix_tree": words, "batch.prompts_per_step": 5})
        actor = actor_of(recipe)
        batch = groups_with_prompts(recipe)[0]
        found.append(np.concatenate(response_logprobs(actor.policy, batch, torch.device("cpu"), recipe)))
    assert np.abs(found[0] - found[1]).max() < 1e-5 and (found[0] != found[1]).any()


def test_exact_mode_computes_each_row_alone(policy_dir):
    recipe = recipe_of(policy_dir, **{"generator.exact": "true", "batch.prompts_per_step": 5})
    _, metrics = step_of(recipe, is_double=False)
    assert metrics["actor/tree_ratio"] == 1.0


def test_a_step_is_the_same_bit_for_bit_when_it_is_trained_again(policy_dir):
    recipe = recipe_of(policy_dir, **{"batch.prompts_per_step": 5})
    first, second = (step_of(recipe, is_double=False) for _ in range(2))
    assert first[1]["actor/grad_norm"] == second[1]["actor/grad_norm"] and first[1]["actor/tree_ratio"] > 1.5
    for one, other in zip(first[0].policy.parameters(), second[0].policy.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("trained_as", ["true", "false"])
def test_saved_steps_are_repeated_as_they_were_trained_whatever_the_setting_is_now(policy_dir, tmp_path, trained_as):
    """Their micro-batches were planned for it, and the last bits depend on it."""
    settings = {"batch.prompts_per_step": 5, "run.dir": tmp_path / "run"}
    recipe = recipe_of(policy_dir, **settings, **{"trainer.prefix_tree": trained_as})
    trained_run(recipe, [groups_with_prompts(recipe)])
    for words in ("true", "false"):
        again = recipe_of(policy_dir, **settings, **{"trainer.prefix_tree": words})
        assert replay_steps(again) == 0
        _, metrics = train_again(cast(Learner, actor_of(again)), tmp_path / "run", 0)
        assert (metrics["actor/tree_ratio"] > 1.0) == (trained_as == "true")
    assert replay_steps(recipe, new_pack=NewPack(tmp_path / "pack.zip", "1.2.3")) == 0
    with opened_pack(tmp_path / "pack.zip") as (pack, folder):
        assert replay_pack(pack.recipe(folder), pack, folder) == 0


def test_exact_mode_computes_values_and_the_reference_of_each_row_alone(policy_dir):
    recipe = recipe_of(policy_dir, **{"generator.exact": "true"})
    reference = load_policy(str(policy_dir))
    assert reference.longest_in_tree > 0 and longest_in_tree(reference, recipe) == 0


RANKS = """
from trainer.learners.test_shared_tokens import SMOOTH, both_ways
policy, words = args
settings = SMOOTH | {"batch.prompts_per_step": 5} | eval(words)
both_ways(lambda words: recipe_of(policy, **(settings | words)), 2e-6, is_double=False, group=group)
"""


@pytest.mark.parametrize(
    ("size", "shard_ranks", "settings"),
    [
        (2, 2, {}),
        # Two of four ranks have no row of the first batch.
        pytest.param(4, 4, {}, marks=pytest.mark.slow),
        pytest.param(4, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"trainer.activation_checkpointing": "true"}, marks=pytest.mark.slow),
        pytest.param(4, 4, {"lora.rank": 4}, marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_step_of_rows_alone(policy_dir, tmp_path, size, shard_ranks, settings):
    on_ranks(tmp_path, size, shard_ranks, RANKS, policy_dir, repr(settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm.loss": "gspo", "algorithm.importance_sampling": "sequence_mask", "algorithm.proximal": "rollout"},
        {"algorithm.loss_agg": "seq-mean-token-mean", "algorithm.kl_coef": 0.1, "algorithm.entropy_coef": 0.01},
        {"algorithm.advantage": "gae", "critic.lr": 0.3},
    ],
    ids=["default", "gspo", "sequence means", "gae"],
)
def test_nothing_in_a_micro_batch_waits_for_the_device(policy_dir, monkeypatch, settings):
    recipe = recipe_of(policy_dir, **{"batch.prompts_per_step": 5} | settings)
    counts: list[Operators] = []
    backward = Actor._backward

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        with Operators() as found:
            logprobs = backward(*arguments, **options)
        counts.append(found)
        return logprobs

    monkeypatch.setattr(Actor, "_backward", counted)
    train(actor_of(recipe), groups_with_prompts(recipe))
    assert len(counts) == 2 and all(each.num_operators > 100 for each in counts)
    assert [each.num_reads for each in counts] == [0, 0], counts
