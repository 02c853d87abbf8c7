"""A whole run, in memory, whose prompts come from two files, chosen by a curriculum or dropped: it is resumed and replayed to the bit."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.system import System

from headrace.relay.journal.events import GroupRestored, Leased, PromptDropped
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.trainer.replay.replay import replay_steps

STEPS = 6
CURRICULUM = "def easy_first(step, row):\n    return (row['level'] <= step) * 0.7\n"
ROWS = "ROWS = [{'prompt': f'tell {i}', 'level': i} for i in range(5)]\n"


def data_system(folder: Path, **settings: object) -> System:
    """A run whose sixth prompt is too long, and whose seventh row is not JSON; five more rows are of a Python file."""
    folder.mkdir(exist_ok=True)
    system = System(
        folder,
        **{
            "run.schedule": "sync",
            "generator.exact": True,
            "run.steps": STEPS,
            "checkpoint.every": 2,
            "run.save_rows": "all",
            "data.path": f"[{folder}/data.jsonl, {folder}/rows.py:ROWS]",
            "data.too_long": "drop",
            "data.curriculum": f"{folder}/curriculum.py:easy_first",
            **settings,
        },
    )
    (folder / "curriculum.py").write_text(CURRICULUM)
    (folder / "rows.py").write_text(ROWS)
    rows = [json.dumps({"prompt": f"say {i}" if i != 5 else "x" * 300, "level": i % 5}) for i in range(20)]
    rows[6] = "not JSON"
    (folder / "data.jsonl").write_text("".join(row + "\n" for row in rows))
    return system


def trained(system: System) -> list[dict[str, torch.Tensor]]:
    """The rows that each step trained, by their names without the number of the attempt."""
    files = [system.dir / f"rows/step_{step}.safetensors" for step in range(STEPS)]
    return [{re.sub(r"@\d+", "", name): rows for name, rows in load_file(file).items()} for file in files]


def test_a_run_that_is_interrupted_trains_the_rows_of_one_that_is_not(tmp_path: Path):
    whole = data_system(tmp_path / "whole").start_all(num_rollouts=1)
    whole.wait()
    first = data_system(tmp_path / "run").start_all(num_rollouts=1)
    first.until(lambda: first.num_steps() >= 3)
    first.interrupt()
    first.wait()
    again = data_system(tmp_path / "run", **{"run.resume": "auto"}).start_all(num_rollouts=1)
    again.wait()
    for step, (expected, found) in enumerate(zip(trained(whole), trained(again), strict=True)):
        assert expected.keys() == found.keys(), step
        assert all(torch.equal(expected[name], found[name]) for name in expected), step
    assert any(isinstance(event, PromptDropped) for event in whole.events())
    assert any(isinstance(event, Leased) and event.group.prompt >= 20 for event in whole.events())
    for system in (whole, again):
        account = account_dict(replay(system.dir / "journal.jsonl"))
        assert (account["trained"], account["holds"]) == (4 * STEPS, True)
        assert replay_steps(system.recipe) == 0
    steps = [event for event in again.events() if isinstance(event, Leased | GroupRestored)]
    assert sum(event.passed_over for event in steps) > 0
