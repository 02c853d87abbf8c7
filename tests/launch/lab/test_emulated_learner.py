"""A trainer on emulated devices: its work takes time from the moment when it begins."""

from dataclasses import dataclass

import pytest
from msgspec import structs
from support.actors import batch_of
from support.emulated_run import EMULATED

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.emulated.learner import EmulatedLearner, training_s
from headrace.launch.lab.settings import lab_of
from headrace.launch.lab.virtual.network import VirtualFleet, VirtualMailboxes
from headrace.launch.lab.virtual.training import VirtualPublisher
from headrace.launch.lab.virtual.world import World, WorldClock


def learner_of(world: World, recipe: Recipe) -> EmulatedLearner:
    fleet = VirtualFleet("actor", 0, {}, VirtualMailboxes(world), recipe.comm)
    return EmulatedLearner(fleet, recipe, WorldClock(world), VirtualPublisher(lambda version: None))


def test_log_probs_take_their_time_from_when_they_begin():
    recipe = read_recipe(None, [f"{key}={value}" for key, value in EMULATED.items()])
    world = World()
    learner, batch = learner_of(world, recipe), batch_of(0)
    world.run_to(50.0)  # the trainer waits for its first rows
    learner.logprobs(batch)
    forward_s = (
        sum(row.num_tokens for row in batch.rows)
        * lab_of(recipe.lab).train_us
        * 1e-6
        / lab_of(recipe.lab).train_gpus
        / 3
    )
    assert world.now - 50.0 == pytest.approx(forward_s)


@dataclass(frozen=True)
class Row:
    num_tokens: int


def test_ranks_of_a_trainer_wait_for_the_one_with_most_tokens_and_a_small_micro_batch_for_its_collectives():
    one = structs.replace(lab_of({"profile": "papers"}), train_gpus=4, train_us=1e6)
    rows = [Row(length) for length in (900, 500, 400, 300, 300)]
    assert training_s(rows, one, 1000) == pytest.approx(2400 / 4), "all GPUs share every row"
    ranks = structs.replace(one, trainer_ranks=4)
    assert training_s(rows, ranks, 1000) == pytest.approx(900), "600 of the other ranks' tokens are less"
    assert training_s(rows, ranks, 500) == pytest.approx(900 + 300), "the rank with two rows has two micro-batches"
    slow = structs.replace(ranks, collectives_s=400)
    assert training_s(rows, slow, 500) == pytest.approx(900 + 400)
    assert training_s(rows, structs.replace(slow, micro_batch_s=7), 500) == pytest.approx(900 + 400 + 2 * 7)
