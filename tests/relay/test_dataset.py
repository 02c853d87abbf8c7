"""A user's data comes in several formats; all give the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings
from headrace.relay.dataset import MAX_ROW_BYTES, TableRows, checked_prompts, open_rows

ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(5)]
datasets = pytest.importorskip("datasets", reason="parquet and Hugging Face data sets need the `datasets` package")


@pytest.fixture(params=["jsonl", "parquet", "folder"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same rows in each format."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_list(ROWS)
    path = tmp_path / f"data.{request.param}"
    match request.param:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "parquet":
            table.to_parquet(path)
        case "folder":
            table.save_to_disk(path)
    return path


def test_every_format_gives_the_same_rows(path: Path):
    rows = open_rows(DataSettings(path=str(path)))
    assert [json.loads(rows[i]) for i in range(len(rows))] == ROWS
    assert list(checked_prompts(rows, str(path))) == [row["prompt"] for row in ROWS]


def test_any_other_file_is_read_as_jsonl(tmp_path: Path):
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    assert len(open_rows(DataSettings(path=str(tmp_path / "prompts")))) == 1


def test_the_error_for_a_missing_file_names_the_setting(tmp_path: Path):
    for name in ("no.jsonl", "no.txt", "no"):
        with pytest.raises(SettingError, match=r"data\.path: .* does not exist"):
            open_rows(DataSettings(path=str(tmp_path / name)))


def test_the_error_for_an_unreadable_file_names_the_setting(tmp_path: Path):
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(SettingError, match="data.path"):
        open_rows(DataSettings(path=str(tmp_path / "bad.parquet")))


def test_the_error_for_a_row_without_a_prompt_names_the_row(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "x"}\n{"question": "y"}\n')
    with pytest.raises(SettingError, match=r"data.jsonl:2 has no `prompt` column; it has question"):
        list(checked_prompts(open_rows(DataSettings(path=str(path))), str(path)))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "x", "score": NaN}', r"JSON has no NaN"),
        ('{"prompt": "x", "score": -Infinity}', r"JSON has no NaN"),
        ('{"prompt": "\\ud800"}', r"is not JSON"),
        (json.dumps({"prompt": "x" * MAX_ROW_BYTES}), r"bytes; at most"),
    ],
)
def test_a_row_that_could_not_travel_in_a_message_is_named_before_the_run(row: str, reason: str, tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{row}\n')
    with pytest.raises(SettingError, match=rf"data\.path: .*data\.jsonl:2 .*{reason}"):
        list(checked_prompts(open_rows(DataSettings(path=str(path))), str(path)))


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8-sig")
    path = str(tmp_path / "data.jsonl")
    assert list(checked_prompts(open_rows(DataSettings(path=path)), path)) == ["x"]


def test_a_missing_number_of_a_table_is_null():
    table = datasets.Dataset.from_list([{"prompt": "x", "score": float("nan"), "parts": {"least": float("-inf")}}])
    assert json.loads(TableRows(table)[0]) == {"prompt": "x", "score": None, "parts": {"least": None}}


def rows_of(path: Path, text: str, **settings: Any) -> list[dict[str, Any]]:
    path.write_text(text)
    rows = open_rows(DataSettings(path=str(path), **settings))
    list(checked_prompts(rows, str(path), settings.get("prompt_column", "prompt")))
    return [json.loads(rows[i]) for i in range(len(rows))]


def test_the_prompt_may_be_in_any_column_and_the_others_stay(tmp_path: Path):
    text = json.dumps({"question": "q", "prompt": "other", "answer": 1})
    (row,) = rows_of(tmp_path / "data.jsonl", text, prompt_column="question")
    assert row == {"question": "q", "prompt": "q", "answer": 1}


def test_a_row_without_the_named_column_is_an_error_even_if_it_has_a_prompt(tmp_path: Path):
    with pytest.raises(SettingError, match=r":1 has no `question` column; it has answer; see data\.prompt_column"):
        rows_of(tmp_path / "data.jsonl", '{"prompt": "x", "answer": 1}', prompt_column="question")


USER, SYSTEM = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("prompt", "settings", "expected"),
    [
        ("q", {}, "q"),
        ("q", {"chat_template": "tokenizer"}, [USER]),
        ("q", {"system_prompt": "s"}, [SYSTEM, USER]),
        ([USER], {"system_prompt": "s"}, [SYSTEM, USER]),
        (
            [{"role": "system", "content": "own"}, USER],
            {"system_prompt": "s"},
            [{"role": "system", "content": "own"}, USER],
        ),
    ],
)
def test_text_becomes_a_chat_where_a_template_or_a_system_prompt_is_set(
    tmp_path: Path, prompt: Any, settings: dict[str, str], expected: Any
):
    (row,) = rows_of(tmp_path / "data.jsonl", json.dumps({"prompt": prompt}), **settings)
    assert row["prompt"] == expected


def test_a_subset_of_a_hub_data_set_is_loaded(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or ROWS)
    open_rows(DataSettings(path="openai/gsm8k", subset="main", split="test"))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
