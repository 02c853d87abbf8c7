"""The rows and files that a Python caller passes to a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import headrace
from headrace.launch.python.inputs import PythonInputs


def test_two_calls_that_choose_the_same_names_of_files_are_not_mixed(tmp_path: Path):
    first, second = PythonInputs(tmp_path), PythonInputs(tmp_path)
    first.write()
    with pytest.raises(headrace.SettingError, match=r"run.dir: a run is under way in"):
        second.write()


class Table:
    """Rows as a `datasets.Dataset` has them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


@pytest.mark.parametrize("form", [list, Table])
def test_rows_become_a_file_with_plain_values(tmp_path: Path, form: Any):
    rows = [
        {"prompt": "a\n", "n": np.int64(3), "v": np.ones(2), "p": (1, Path("x")), "no": float("nan")},
        {"prompt": "b"},
    ]
    inputs = PythonInputs(tmp_path / "run")
    found = inputs.settings({"data.path": form(rows)})
    inputs.write()
    lines = Path(found["data.path"]).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": "a\n", "n": 3, "v": [1.0, 1.0], "p": [1, "x"], "no": None},
        {"prompt": "b"},
    ]


def test_a_data_set_of_the_library_is_written_and_one_with_splits_is_not(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "n": [1, 2]})
    inputs = PythonInputs(tmp_path / "run")
    inputs.settings({"eval.path": table})
    inputs.write()
    assert (tmp_path / "run/inputs/held_out.jsonl").read_text() == '{"prompt": "a", "n": 1}\n{"prompt": "b", "n": 2}\n'
    with pytest.raises(
        headrace.SettingError, match=r"not an object of type DatasetDict; choose a split, such as \['train'\]"
    ):
        headrace.train("m", "length", datasets.DatasetDict(train=table))


def test_a_list_of_texts_has_prompts_and_a_list_of_existing_files_has_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"prompt": "a"}\n')
    inputs = PythonInputs(tmp_path / "run")
    assert inputs.settings({"data.path": ["a.jsonl", Path("a.jsonl")]}) == {"data.path": [f"{tmp_path}/a.jsonl"] * 2}
    inputs.settings({"data.path": ["Read a.jsonl", "1/2", "run", "a\0b"]})
    inputs.write()
    lines = (tmp_path / "run/inputs/prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["Read a.jsonl", "1/2", "run", "a\0b"]


@pytest.mark.parametrize(
    ("data", "missing"),
    [
        (["a.jsonl", "typo"], "typo"),
        (["typo.jsonl", "b.parquet"], "typo.jsonl"),
        ([Path("a.jsonl"), "typo.jsonl"], "typo.jsonl"),
        (["openai/gsm8k", "org/other"], "openai/gsm8k"),
    ],
)
def test_names_of_files_do_not_become_prompts(
    data: list[Any], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    with pytest.raises(headrace.SettingError, match=f"^eval.path: '{missing}' does not exist, in a list of files"):
        PythonInputs(tmp_path / "run").settings({"eval.path": data})
    PythonInputs(tmp_path / "run").settings({"eval.path": [{"prompt": each} for each in data]})


def test_paths_become_absolute_and_other_words_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def score(): ...\n")
    Path("gsm8k").mkdir()
    given = {
        "reward.path": ["gsm8k", "rewards.py:score"],
        "data.path": "gsm8k",
        "model.dtype": "gsm8k",
        "model.path": "a/b",
    }
    found = PythonInputs(tmp_path / "run").settings(given)
    assert found["reward.path"] == ["gsm8k", f"{tmp_path}/rewards.py:score"]
    assert (found["data.path"], found["model.dtype"], found["model.path"]) == (f"{tmp_path}/gsm8k", "gsm8k", "a/b")
    assert yaml.safe_load(yaml.safe_dump(found)) == found
