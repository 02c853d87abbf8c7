"""The time to a reward is the steps of the rows' age times the seconds of a step, and says where an age was not measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from bench.time_to_reward import main, steps_at, steps_by_age, steps_to, table, target_of

from headrace.comm.errors import SettingError
from headrace.launch.lab.figures import Figures


def cell(age: int, curve: Sequence[float], seed: int = 0) -> Mapping[str, object]:
    about: dict[str, object] = {
        "task": "digits",
        "variant": "default",
        "age": str(age),
        "seed": seed,
        "steps": len(curve),
        "final": 0.0,
    }
    return about | {"curves": {"reward/mean": list(curve)}}


def rise(steps: int, age: int = 0) -> list[float]:
    """Rewards of rows whose policy, `age` steps older, rises from 0 to 1 within `steps` steps."""
    return [min(max(step - age, 0) / steps, 1.0) for step in range(300)]


def run_of(folder: Path, step_s: float, staleness: dict[str, float]) -> Path:
    folder.mkdir()
    figures = Figures(1.0, step_s, 0.0, 0.0, 0.0, staleness)
    (folder / "outcome.json").write_bytes(msgspec.json.encode(figures))
    return folder


def test_a_policy_has_a_reward_before_its_rows_show_it():
    assert steps_to(cell(0, rise(100)), 0.5, 1) == 50
    assert steps_to(cell(8, rise(100, age=8)), 0.5, 1) == 50


def test_a_window_of_steps_counts_at_its_middle():
    assert steps_to(cell(0, rise(100)), 0.5, 11) == 50


def test_the_target_is_a_share_of_what_fresh_rows_gain():
    curves = [[0.2] * 150 + [0.8] * 150, [0.4] * 150 + [0.6] * 150]
    assert target_of([cell(0, curve) for curve in curves] + [cell(8, [0.0] * 300)], 0.5, 10) == pytest.approx(0.5)


def test_an_age_that_half_of_the_seeds_cannot_learn_at_has_no_steps():
    flat = [0.0] * 300
    cells = [cell(0, rise(100)), cell(8, rise(100), seed=0), cell(8, flat, seed=1)]
    assert steps_by_age(cells, 0.5, 1) == {0.0: 50.0}


def test_steps_lie_on_the_line_between_ages_and_are_a_bound_above_the_highest():
    steps = {0.0: 50.0, 1.0: 60.0, 3.0: 100.0}
    assert steps_at(0.5, steps) == (55.0, False)
    assert steps_at(3.0, steps) == (100.0, False)
    assert steps_at(9.0, steps) == (100.0, True)


def test_the_table_multiplies_steps_and_seconds(tmp_path: Path):
    ages = tmp_path / "ages"
    ages.mkdir()
    for age, steps in ((0, 100), (1, 200)):
        (ages / f"{age}.json").write_text(json.dumps(cell(age, rise(steps, age))))
    fast = run_of(tmp_path / "headrace-4-64gpus-512groups-7rollout", 36.0, {"1": 0.5, "2": 0.5})
    slow = run_of(tmp_path / "sync", 72.0, {"0": 1.0})
    text = table(ages, [slow, fast], [0.5], 1)
    assert "| digits, 50% | 0.500 | 50 | 100 |" in text
    assert "| task, share of the gain | sync (0.0) | headrace-4, 64 GPUs (1.5) |" in text
    assert "| digits, 50% | 1.00 h | >1.00 h |" in text  # a staleness of 1.5 was not measured


def test_a_run_that_has_not_finished_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "0.json").write_text(json.dumps(cell(0, rise(100))))
    with pytest.raises(SettingError, match="not the folder of a finished run"):
        table(tmp_path, [tmp_path], [0.5], 1)
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "outcome.json" in capsys.readouterr().err
