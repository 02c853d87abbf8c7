"""The texts of a run, as `Run.samples` and `Run.evaluations` give them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.policies import tiny_policy

import headrace
from headrace.launch.config.load import recipe_of, save_recipe
from headrace.relay.queue.row_file import write_rows


class Listed(msgspec.Struct):
    """The list of a file of rows, which nothing here reads."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> headrace.Run:
    """A run with one step, whose recipe names the model by a path that is not one of the present folder."""
    monkeypatch.chdir(tmp_path)
    made = save_recipe(
        recipe_of(
            {"model": {"path": "models/mine"}, "reward": {"path": "length"}, "run": {"dir": str(tmp_path / "run")}}
        )
    )
    info: dict[str, Any] = {"metrics": {"length": 4.0, "seconds": 3.5, "length/words": 2.0}}
    row = {
        "prompt_ids": np.array([3, 4]),
        "response_ids": np.array([5]),
        "reward": np.array([4.0], np.float32),
        "reward_info": np.frombuffer(json.dumps(info).encode(), np.uint8),
        "truncated": np.array([0]),
    }
    (made.parent / "rows").mkdir()
    write_rows(made.parent / "rows" / "step_0.safetensors", {"0": row}, Listed())
    return headrace.Run(made.parent)


def test_samples_are_read_from_any_folder_with_the_rewards_of_functions_alone(run: headrace.Run, tmp_path: Path):
    (checkpoint := run.dir / "checkpoints" / "step_1").mkdir(parents=True)
    tiny_policy(tmp_path, "llama").rename(checkpoint / "hf")
    (run.dir / "summary.json").write_text(json.dumps({"export": "runs/run/checkpoints/step_1/hf"}))
    (sample,) = run.samples()
    assert (sample["reward"], sample["rewards"]) == (4.0, {"length": 4.0})
    assert sample["metrics"] == {"seconds": 3.5, "length/words": 2.0}
    assert sample["prompt"] and not sample["truncated"]


def test_evaluations_of_a_file_that_is_being_written_are_its_whole_lines(run: headrace.Run):
    line = {"version": 0, "name": "mine", "row": 0, "sample": 0, "response": "a"}
    written = json.dumps(line) + "\n"
    (run.dir / "evaluations.jsonl").write_text(written + written[:-20])
    assert run.evaluations() == [line]
