"""A step of each algorithm of docs/use/algorithms.md, on random rows of five groups."""

import re
from pathlib import Path

import numpy as np
from support.actors import ALONE, actor_of, batch_of, recipe_of, train
from support.source_tree import ROOT

from headrace.comm.recipe import Recipe
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.learners.builtin import Actor

ROW = re.compile(r"^\| ([^|]+) \| ((?:`[a-z_]+\.[a-z_]+=[^`]+` ?)+)\| [^|]+ \|$", re.MULTILINE)
ALGORITHMS = {
    name: dict(word.split("=") for word in re.findall(r"`([^`]+)`", words))
    for name, words in ROW.findall((ROOT / "docs" / "use" / "algorithms.md").read_text())
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


def algorithm_recipe(policy: Path, name: str, **settings: object) -> Recipe:
    """Responses of the test have up to 12 tokens, so the overlong buffer begins within them."""
    longest = (
        {"sampling.max_new_tokens": 14, "algorithm.overlong_buffer": 8} if "overlong" in str(ALGORITHMS[name]) else {}
    )
    return recipe_of(policy, **({"batch.prompts_per_step": 5} | ALGORITHMS[name] | longest | settings))


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
