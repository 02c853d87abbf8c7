"""The task of `quickstart smollm2`: sums whose held-out prompts are not trained on, the time that it announces, and what it shows at the end."""

import json
from pathlib import Path

import pytest

from headrace.comm.recipe import EvalSettings
from headrace.launch.config.load import read_recipe
from headrace.launch.recipes import addition, smollm2_task, step_speed
from headrace.launch.recipes.parts import SMOLLM2


def test_no_held_out_pair_is_trained_on_in_either_order():
    held_out = {tuple(sorted(pair)) for pair in addition.held_out()}
    for seed in (0, 1):
        trained = {tuple(sorted(pair)) for pair in addition.training(seed)}
        assert len(held_out) == 200 and not held_out & trained and len(held_out | trained) == 90 * 91 // 2
    assert addition.training(0) != addition.training(1)


def test_the_last_number_of_a_response_has_to_be_right():
    assert [addition.score(text, "146") for text in ("146", "56 + 90 = 146.", "146 or 147", "1460", "none")] == [
        1,
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("dtype", "speed", "minutes"),
    [
        ("bfloat16", {"bfloat16": 0.0258, "float32": 0.1}, 12),
        ("float32", {"bfloat16": 0.2, "float32": 0.05}, 24),
        ("float32", {}, None),
    ],
)
def test_the_time_is_that_of_the_run_s_type_on_the_cores_of_the_machine(dtype, speed, minutes, monkeypatch, capsys):
    monkeypatch.setattr(step_speed, "measured", lambda: speed)
    monkeypatch.setattr(smollm2_task.os, "sched_getaffinity", lambda _: {0, 1})
    recipe = read_recipe(SMOLLM2, [f"model.dtype={dtype}"])
    smollm2_task.announce(recipe, is_evaluated=True)
    text = capsys.readouterr().err
    assert (f"on the 2 cores of this machine, and two evaluations: about {minutes} min" in text) is bool(speed)
    smollm2_task.announce(recipe, is_evaluated=False)
    assert ("on the 2 cores of this machine: about" in capsys.readouterr().err) is bool(speed)


def test_a_run_of_a_few_steps_has_no_warm_up():
    words = ["model.path=MODEL", "data.path=DATA"]
    assert smollm2_task.missing_parts(read_recipe(SMOLLM2, [*words, "run.steps=3"])) == {"optimizer.warmup_steps": "0"}
    assert smollm2_task.missing_parts(read_recipe(SMOLLM2, words)) == {}


def test_a_run_of_agents_has_neither_the_reward_nor_the_evaluation_of_the_task():
    recipe = read_recipe(SMOLLM2, ["environment.path=serve", "rollout.serve=0"])
    assert smollm2_task.missing_parts(recipe).keys() == {"model.path", "data.path"}


def test_answers_before_and_after_stand_side_by_side(tmp_path: Path, capsys):
    addition.write_data(tmp_path, seed=0)
    held_out = tmp_path / addition.HELD_OUT_FILE
    lines = [
        {"version": version, "name": held_out.stem, "row": row, "reward": reward, "text": text}
        for version, row, reward, text in (
            (0, 0, 0.0, "a first line,\nlost with its hub"), (0, 0, 0.0, "56 + 90 = 156"), (0, 1, 1.0, "159"),
            (30, 0, 0.0, "between"), (60, 1, 1.0, "159"), (60, 0, 1.0, "146"),
        )
    ]  # fmt: skip
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    smollm2_task.show_progress(tmp_path, EvalSettings(path=str(held_out)))
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[2:] == [
        "What is 56 + 90? Answer with the number only. 56 + 90 = 156 (wrong) 146 (right)",
        "What is 66 + 93? Answer with the number only. 159 (right) 159 (right)",
        "right: 1 of 2 (0.500) before, 2 of 2 (1.000) after 60 steps",
    ]


def test_a_run_without_two_evaluations_shows_nothing(tmp_path: Path, capsys):
    smollm2_task.show_progress(tmp_path, EvalSettings())
    assert capsys.readouterr().out == ""
