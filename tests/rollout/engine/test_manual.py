"""The manual's example and its list of calls, and the table entries that a step adds for a captured graph."""

import runpy
from pathlib import Path

import numpy as np
from support.policies import random_prompts, tiny_policy

from headrace.rollout import Engine, SamplingParams

MANUAL = Path(__file__).resolve().parents[3] / "docs/use/generator.md"


def test_the_example_of_the_manual_runs_as_printed(tmp_path, capsys):
    example = MANUAL.read_text().split("```python\n")[1].split("```")[0]
    assert "path/to/checkpoint" in example
    script = tmp_path / "example.py"
    script.write_text(example.replace("path/to/checkpoint", str(tiny_policy(tmp_path))))
    names = runpy.run_path(str(script))
    assert [c.prompt_ids for c in names["completions"][::4]] == [
        names["engine"].text.encode(prompt) for prompt in ("Once upon a time", "Lily saw")
    ]
    assert capsys.readouterr().out.split()[-2] in ("stop", "length")


def test_the_manual_names_every_call_and_every_parameter():
    manual = MANUAL.read_text()
    for call in (
        "generate",
        "stream",
        "add_group",
        "step",
        "cancel",
        "pause",
        "resume",
        "export_sequences",
        "import_sequences",
        "bind",
    ):
        assert hasattr(Engine, call) and f"`{call}" in manual or f", `{call}" in manual
    assert not [name for name in SamplingParams.__dataclass_fields__ if f"`{name}`" not in manual]


def test_the_entries_that_each_step_adds_keep_a_copied_table_equal_to_the_batch_s(tmp_path):
    engine = Engine(tiny_policy(tmp_path), max_running=5, page_size=64)
    for index, prompt in enumerate(random_prompts(9, longest=120)):
        engine.add_group(prompt, SamplingParams(max_new_tokens=130, ignore_eos=True), [index])
    batch, table, num_updates, num_added = engine.batch, np.zeros(0), -1, 0
    while not engine.idle:
        engine.step()
        if not len(batch):
            continue
        if num_updates != batch.num_updates:
            num_updates, table = batch.num_updates, batch.table.copy()
        for row, column, page in batch.grown:
            table[row, column] = page
            num_added += 1
        assert (table == batch.table).all()
    assert num_added > 5
