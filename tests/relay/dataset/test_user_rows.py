"""Rows that a user's Python file makes are read like those of any other data set, and its mistakes name the setting."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.source_tree import ROOT

from headrace.comm.errors import SettingError
from headrace.comm.plugins import load_object
from headrace.comm.recipe import DataSettings
from headrace.launch.config.checks.data import check_data
from headrace.relay.dataset.opening import open_rows
from headrace.relay.dataset.rows import DatasetRows

ROWS = """
ROWS = [{"prompt": f"p{i}", "level": i} for i in range(1000)]


def made():
    return ROWS


class Rows:
    def __init__(self):
        self.read = []

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.read.append(index)
        return {"prompt": f"p{index}", "level": index}


one = Rows()
"""


def written(folder: Path, text: str, name: str = "Rows", **settings: Any) -> DataSettings:
    (folder / "rows.py").write_text(text)
    return DataSettings(path=f"{folder / 'rows.py'}:{name}", **settings)


def values(rows: DatasetRows) -> list[Any]:
    return [json.loads(rows[index]) for index in range(len(rows))]


@pytest.mark.parametrize("name", ["ROWS", "made", "Rows", "one"])
def test_an_object_or_what_a_class_or_function_returns_gives_the_rows(tmp_path: Path, name: str):
    rows = open_rows(written(tmp_path, ROWS, name))
    assert values(rows) == [{"prompt": f"p{i}", "level": i} for i in range(1000)] == values(rows)


def test_the_prompt_takes_the_form_that_the_settings_ask_for(tmp_path: Path):
    text = "Rows = lambda: [{'question': 'q'}]\n"
    checked = check_data(written(tmp_path, text, prompt_column="question", system_prompt="Think."))
    assert checked.prompts == [[{"role": "system", "content": "Think."}, {"role": "user", "content": "q"}]]


@pytest.mark.parametrize("end", ["0", "7", ""])
def test_a_file_that_ends_the_program_is_an_error_that_names_the_setting(tmp_path: Path, end: str):
    with pytest.raises(SettingError, match=r"^data\.path: .*rows\.py cannot be loaded: it calls sys\.exit"):
        check_data(written(tmp_path, f"import sys\nRows = []\nsys.exit({end})\n"))


def test_few_rows_are_made_before_the_run(tmp_path: Path):
    settings = written(tmp_path, ROWS, "one")
    assert len(check_data(settings).prompts) == 256
    read = load_object("data.path", settings.paths[0]).read
    assert read == [0, *range(256), 0]


CLASS = """
import random


class Rows:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        BODY
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return {'prompt': f'{random.random()}'}",
            "row 1 has changed since it was first read; a row must depend on its index alone",
        ),
        ("return {'prompt': 'x'} if index < 4 else {'question': 'x'}", r":5 has no `prompt` column; it has question"),
        ("return {'prompt': 3}", r":1 has a `prompt` that is neither text nor a list"),
        ("return 'text'", "row 1 is a str, not a dict of columns"),
        ("return {'prompt': 'x', 'answer': {1}}", "row 1 is not JSON: Object of type set is not JSON serializable"),
        ("return {'prompt': 'x', 'answer': float('nan')}", "row 1 is not JSON: Out of range float"),
        ("row = {'prompt': 'x'}; row['row'] = row; return row", "row 1 is not JSON: Circular reference"),
        ("return {'prompt': [{}['x'], 'two\\nlines']}", r"row 1: KeyError: 'x' \(.*rows\.py:10\)$"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_before_the_run(tmp_path: Path, body: str, message: str):
    with pytest.raises(SettingError, match=rf"^data\.path: .*rows\.py:Rows(: )?{message}"):
        check_data(written(tmp_path, CLASS.replace("BODY", body)))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "Rows", r"rows\.py has no Rows"),
        ("Rows = []", "Rows", r"rows\.py:Rows has no rows"),
        ("", "", r"rows\.py: is not of the form FILE\.py:NAME"),
        ("def Rows(): ...", "Rows", "has no __len__; rows are counted with __len__ and read with __getitem__"),
        ("Rows = {1, 2}", "Rows", "has no __getitem__;"),
        ("def Rows(size): ...", "Rows", r"rows\.py:Rows: TypeError: Rows\(\) missing 1 required"),
        ("import no_such_package", "Rows", r"ModuleNotFoundError: No module named 'no_such_package' \(.*rows\.py:1\)$"),
        ("\nRows = (", "Rows", r"SyntaxError: .*rows\.py, line 2"),
        (
            "class Rows(list):\n    def __len__(self):\n        raise OSError('first\\nsecond')",
            "Rows",
            r"OSError: first \(.*:3\)$",
        ),
        ("import sys\ndef Rows():\n    sys.exit(3)", "Rows", r"SystemExit: 3 \(.*:3\)$"),
    ],
)
def test_a_file_that_gives_no_rows_is_told_in_one_line(tmp_path: Path, text: str, name: str, message: str):
    with pytest.raises(SettingError, match=rf"^data\.path: .*{message}"):
        open_rows(written(tmp_path, text, name))


def test_a_file_that_is_missing_or_named_without_rows_is_told():
    with pytest.raises(SettingError, match=r"^data\.path: none\.py does not exist$"):
        open_rows(DataSettings(path="none.py:Rows"))
    with pytest.raises(SettingError, match=r"^data\.path: none\.py is not of the form FILE\.py:NAME$"):
        open_rows(DataSettings(path="none.py"))


def test_a_row_that_is_another_one_in_a_later_epoch_is_told(tmp_path: Path):
    settings = written(tmp_path, ROWS, "ROWS")
    rows = open_rows(settings)
    first = values(rows)
    load_object("data.path", settings.paths[0])[7]["level"] = 8
    assert json.loads(rows[999]) == first[999]
    with pytest.raises(SettingError, match=r"rows\.py:ROWS: row 8 has changed"):
        rows[7]


@pytest.mark.extra
def test_the_tasks_of_reasoning_gym_in_the_document_are_read_and_scored(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    text = (ROOT / "docs" / "use" / "data.md").read_text()
    (tmp_path / "legs.py").write_text(text[text.index("# legs.py") :].partition("```")[0])
    train, test = (open_rows(DataSettings(path=f"{tmp_path / 'legs.py'}:{name}")) for name in ("Train", "Test"))
    assert len(train) == 100_000 and len(test) == 100 and train[7] == train[7] != train[8]
    assert not {test[index] for index in range(100)} & {train[index] for index in range(100)}
    tasks, score = (load_object("reward.path", f"{tmp_path / 'legs.py'}:{name}") for name in ("TASKS", "score"))
    answer, task = tasks[7]["answer"], json.loads(train[7])["task"]
    assert score(f"so <answer> 1 </answer> no <answer>\n{answer}\n</answer>", task) == score(answer, task) == 1.0
    assert score(f"{answer} <answer>no</answer>", task) < 1.0
