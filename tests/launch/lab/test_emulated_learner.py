"""A trainer on emulated devices: its work takes time from the moment when it begins."""

import pytest
from support.actors import batch_of
from support.emulated_run import EMULATED

from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.emulated.learner import EmulatedLearner
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
