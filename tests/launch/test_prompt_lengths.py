"""The plan of a run's memory goes by the longest prompt of its data, not by the policy's context."""

import json
from pathlib import Path

import pytest
from support.policies import tiny_policy

from headrace.comm.recipe import Recipe
from headrace.launch.config.device_defaults import with_device_defaults
from headrace.launch.config.gpus import Gpus
from headrace.launch.config.load import read_recipe
from headrace.launch.config.memory_plan import MemoryPlan
from headrace.launch.config.prompt_lengths import longest_prompt
from headrace.launch.placement import place_ranks


@pytest.fixture
def recipe(tmp_path):
    """A recipe of a small policy with these prompts."""
    path = tiny_policy(tmp_path, "llama", max_position_embeddings=4096)

    def build(prompts, *words) -> Recipe:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        return read_recipe(None, [f"model.path={path}", f"data.path={data}", "sampling.max_new_tokens=32", *words])

    return build


def plan_of(recipe, longest, **changes):
    config = json.loads((Path(recipe.model.path) / "config.json").read_text())
    places = place_ranks(recipe.roles)
    return MemoryPlan(recipe, config | changes, places, Gpus(), longest)


def test_the_longest_prompt_is_counted_in_tokens(recipe):
    short, long = "12", "1 2 3 4 5 6 7 8 9"
    one, both = (longest_prompt(recipe(prompts)) for prompts in ([short], [short, long, short]))
    assert one and both and both.num_prompts == 3 and both.tokens > one.tokens
    assert both.tokens <= len(long.encode()) + 2


def test_a_trajectory_is_prompt_and_response_but_with_an_environment_of_the_user_the_whole_context(recipe):
    """The answers of tools count as response; the length that an environment's reset adds to the prompt is not known."""
    own = recipe(["1 2 3"])
    longest = longest_prompt(own)
    assert longest and longest.row_tokens(own.environment, 32, 4096) == longest.tokens + 32
    assert longest.row_tokens(own.environment, 32, 20) == 20
    with_tools, in_a_room = (
        recipe(["1 2 3"], f"environment.{w}") for w in ("tools=[tools.py:search]", "path=rooms.py:Room")
    )
    assert longest.row_tokens(with_tools.environment, 32, 4096) == longest.tokens + 32
    assert longest.row_tokens(in_a_room.environment, 32, 4096) == 4096


def test_short_prompts_need_a_small_cache_whatever_the_context_is(recipe):
    own = recipe(["1 2 3"])
    known, unknown = (plan_of(own, longest).needs["rollout"] for longest in (longest_prompt(own), None))
    assert known.device["key-value cache"] < 0.2 * unknown.device["key-value cache"]


def test_data_that_cannot_be_read_leave_the_context(recipe):
    own = recipe(["1 2 3"])
    assert longest_prompt(own, unmade=["data.path"]) is None
    assert longest_prompt(read_recipe(None, [f"model.path={own.model.path}", "data.path=none.jsonl"])) is None


def test_without_a_gpu_micro_batches_are_small_unless_the_recipe_sets_them(recipe):
    own, given = recipe(["1 2 3"]), recipe(["1 2 3"], "optimizer.micro_tokens=8192")
    assert with_device_defaults(own, Gpus()).optimizer.micro_batch == 2048
    assert with_device_defaults(own, Gpus(("0",), 80)).optimizer.micro_batch == 8192
    assert with_device_defaults(given, Gpus()).optimizer.micro_batch == 8192
