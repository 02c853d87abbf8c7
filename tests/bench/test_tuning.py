"""Tuning the entrants of a comparison: the climb, its budget, and the knobs that each entrant has."""

from pathlib import Path

import pytest
from bench.schedules.knobs import Knobs, key_of, ladders, read_tuned, save_tuned, starts

from headrace.launch.lab.tuning import climb


def speed_of(knobs: Knobs) -> float:
    """Highest at 9 rollouts, 192 trajectories and a queue of two batches."""
    running = {None: 0, 384: 1, 256: 2, 192: 5, 128: 3}
    return running.get(knobs.max_running, 0) + (knobs.lead == 512) - abs(knobs.rollouts - 9)


def test_a_climb_finds_the_best_of_knobs_that_depend_on_each_other():
    start = Knobs(rollouts=7)
    found = climb(start, ladders("partial", start, 16, 256), speed_of, budget=60)
    assert (found.rollouts, found.max_running) == (9, 192)


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_climb_tries_no_more_knobs_than_its_budget_and_none_twice(budget: int):
    tried: list[Knobs] = []

    def speed(knobs: Knobs) -> float:
        tried.append(knobs)
        return speed_of(knobs)

    start = Knobs(rollouts=4)
    found = climb(start, ladders("headrace", start, 16, 256), speed, budget)
    assert len(tried) == len(set(tried)) == budget
    assert speed_of(found) == max(map(speed_of, tried))


def test_a_knob_without_an_effect_stays_at_the_recipes_choice():
    start = Knobs(rollouts=7)
    assert climb(start, ladders("partial", start, 16, 256), lambda knobs: 1.0, budget=50) == start


def test_an_entrant_is_tuned_in_the_knobs_that_it_has():
    start = Knobs(rollouts=2, max_running=160)
    names = {entrant: list(ladders(entrant, start, 4, 10)) for entrant in ("sync-colocated", "stream_sync", "headrace")}
    assert names == {
        "sync-colocated": ["max_running"],
        "stream_sync": ["rollouts", "max_running"],
        "headrace": ["rollouts", "max_running", "lead"],
    }
    found = ladders("headrace", start, 4, 10)
    assert found["rollouts"] == [1, 2, 3], "both sides of the split have devices"
    assert found["max_running"] == (None, 384, 256, 192, 160, 128, 96, 64)


def test_a_schedule_that_computes_caches_again_is_also_tuned_from_more_rollouts_with_fewer_trajectories():
    def ridge(knobs: Knobs) -> float:
        """Two summits; between them each knob alone loses."""
        return {(16, None): 3.0, (19, 96): 5.0, (20, 96): 6.0}.get((knobs.rollouts, knobs.max_running), 1.0)

    own = Knobs(16)
    begun = starts("partial", own, 32)
    found = [climb(knobs, ladders("partial", knobs, 32, 256), ridge, budget=20) for knobs in begun]
    assert found == [own, Knobs(20, max_running=96)]
    assert starts("headrace", own, 32) == [own] and starts("partial", Knobs(2), 3) == [Knobs(2)]


def test_a_climb_that_begins_beside_the_ladders_finds_the_best_of_them():
    start = Knobs(rollouts=9, max_running=160, lead=300)
    found = ladders("headrace", start, 16, 256)
    assert found["lead"] == (None, 2048, 1024, 512, 300), "a length that was saved for another batch"
    assert climb(start, found, speed_of, budget=60) == Knobs(9, max_running=192, lead=512)


def test_the_chosen_knobs_of_each_entrant_are_kept_beside_the_recipe(tmp_path: Path):
    recipe = str(tmp_path / "devices.yaml")
    assert read_tuned(recipe) == {}
    save_tuned(recipe, "papers", key_of(64, 0), "headrace", Knobs(7))
    save_tuned(recipe, "papers", key_of(64, 512), "partial", Knobs(7, max_running=192))
    save_tuned(recipe, "papers", key_of(64, 0), "partial", Knobs(8))
    save_tuned(recipe, "program", key_of(64, 0), "partial", Knobs(9))
    assert read_tuned(recipe) == {
        "papers": {
            "64": {"headrace": Knobs(7), "partial": Knobs(8)},
            "64-512groups": {"partial": Knobs(7, max_running=192)},
        },
        "program": {"64": {"partial": Knobs(9)}},
    }
    assert str(read_tuned(recipe)["papers"]["64-512groups"]["partial"]) == "generator.max_running=192"
