"""The rows of the harness have the age that a cell asks for, and its table shows each cell."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench import fixed_age

SMALL = ("batch.prompts_per_step=2", "batch.samples_per_prompt=2", "sampling.max_new_tokens=24")


@pytest.fixture(scope="module")
def stories() -> fixed_age.Task:
    task = fixed_age.TASKS["stories"]
    return replace(task, settings=(*task.settings, *SMALL))


def ages_of(task: fixed_age.Task, age: int | None, folder: Path) -> list[float]:
    result = fixed_age.train(task, "default", age, seed=0, num_steps=5, folder=folder)
    return result["curves"]["staleness/token_mean"]


@pytest.mark.parametrize("age", [0, 2])
def test_rows_are_as_old_as_asked_once_there_are_versions_of_that_age(
    stories: fixed_age.Task, age: int, tmp_path: Path
):
    assert ages_of(stories, age, tmp_path) == [min(step, age) for step in range(5)]


def test_the_later_tokens_of_a_mixed_response_are_newer(stories: fixed_age.Task, tmp_path: Path):
    ages = ages_of(stories, None, tmp_path)
    assert ages[0] == 0
    # Four tokens by each of the versions 0 to 3, and the other eight by version 4, the one that is trained.
    assert ages[4] == pytest.approx(sum(4 * age for age in (4, 3, 2, 1)) / 24, abs=0.3)


def test_the_table_has_the_mean_and_the_lowest_of_a_cell(tmp_path: Path):
    curves = {"is/ess": [0.5] * 60, "actor/entropy": [1.0] * 60}
    for seed, final in enumerate((0.5, 0.7)):
        cell = {"task": "stories", "variant": "default", "age": "8", "seed": seed, "steps": 60, "final": final}
        (tmp_path / f"{seed}.json").write_text(json.dumps(cell | {"cpu_s": 1800.0, "curves": curves}))
    table = fixed_age.table(tmp_path)
    assert "| stories, 8, 60 | 0.600 (0.500, 2) ess 0.50 ent 1.00 |" in table
    assert "2 runs, 1.0 CPU hours" in table
