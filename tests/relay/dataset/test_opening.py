"""A user's data comes in several formats; all give the same rows."""

import gzip
import json
import os
import tracemalloc
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings
from headrace.launch.config.checks.data import check_data
from headrace.relay.dataset.opening import CHECKED_ROWS, checked_prompts, open_rows
from headrace.relay.dataset.order import PromptSource
from headrace.relay.dataset.rows import MAX_NESTED, MAX_ROW_BYTES, as_json, row_problem
from headrace.relay.dataset.tables import TableRows
from headrace.relay.hub.prompts import open_prompts

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


def test_a_compressed_file_is_read_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "p", "answer": 1}\n'))
    rows = open_rows(DataSettings(path=str(tmp_path / "rows")))
    assert len(rows) == 1 and json.loads(rows[0]) == {"prompt": "p", "answer": 1}


def test_any_other_file_is_read_as_jsonl(tmp_path: Path):
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    assert len(open_rows(DataSettings(path=str(tmp_path / "prompts")))) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,answer\np,1\n", r"a\.csv is a CSV file, .* give it as JSONL, .* name the folder"),
        ("a.tsv", b"prompt\tanswer\n", r"a\.tsv is a TSV file, .* give it as JSONL"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", r"a\.jsonl\.gz is compressed \(\.gz\); unpack it first"),
        ("a.json", b' \n[\n {"prompt": "p"}\n]\n', r"a\.json is one JSON list, .* give it as JSONL"),
    ],
)
def test_a_file_in_another_form_is_named_with_what_to_give_instead(
    tmp_path: Path, name: str, content: bytes, message: str
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=rf"data\.path: .*{message}"):
        open_rows(DataSettings(path=str(tmp_path / name)))


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
        ('{"prompt": "x", "tree": ' + "[" * 100_000 + "]" * 100_000 + "}", r"nested lists or objects"),
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


def test_a_file_is_read_row_by_row_and_never_whole(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}" * (1 << 15)}) + "\n \r" for i in range(64)))
    tracemalloc.start()
    rows = open_rows(DataSettings(path=str(path)))
    prompts = [json.loads(rows[i])["prompt"][:2] for i in range(len(rows))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert prompts == [f"{i}{i}"[:2] for i in range(64)]
    assert peak < path.stat().st_size / 4


def test_a_deeply_nested_row_and_a_file_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    rows = open_rows(DataSettings(path=str(path), prompt_column="question"))
    assert row_problem(rows[0]) == f"has more than {MAX_NESTED} nested lists or objects"
    monkeypatch.setattr(os, "pread", lambda *_: os.read(-1, 1))
    with pytest.raises(SettingError, match=r"data\.path: cannot read .*data\.jsonl: Bad file descriptor"):
        rows[0]


def test_a_row_may_nest_as_deep_as_its_readers_and_writers_can_go_and_no_deeper():
    def nested(depth: int) -> bytes:
        return b'{"prompt": "x", "answer": ' + b"[" * depth + b"]" * depth + b"}"

    assert row_problem(nested(MAX_NESTED - 1)) == ""
    assert row_problem(nested(MAX_NESTED)) == row_problem(nested(990)) != ""
    assert row_problem(b'{"prompt": "x", "answer": [' + b"[]," * 2 * MAX_NESTED + b"1]}") == "", "many, but flat"


@pytest.mark.parametrize("change", ["in place", "longer", "shorter"])
def test_a_file_that_has_changed_is_named_in_place_of_a_row(tmp_path: Path, change: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    os.utime(path, ns=(1, 1))
    rows = open_rows(DataSettings(path=str(path)))
    assert rows[1] == b'{"prompt": "b"}'
    path.write_text({"in place": '{"prompt": "cc"}\n{"prompt": ""}\n', "longer": "\n" * 99, "shorter": ""}[change])
    with pytest.raises(SettingError, match=r"data\.path: .*data\.jsonl has changed since the run began"):
        rows[1]


def test_a_file_that_is_touched_keeps_its_rows(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n')
    rows = open_rows(DataSettings(path=str(path)))
    for moment in (1, 2):
        os.utime(path, ns=(moment, moment))
        assert rows[0] == b'{"prompt": "a"}'
    path.write_text('{"prompt": "b"}\n')
    with pytest.raises(SettingError, match="has changed since the run began"):
        rows[0]


def test_a_file_that_takes_the_name_of_the_one_in_use_does_not_change_its_rows(tmp_path: Path):
    path, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    path.write_text('{"prompt": "a"}\n')
    other.write_text('{"prompt": "longer"}\n')
    rows = open_rows(DataSettings(path=str(path)))
    other.replace(path)
    assert rows[0] == b'{"prompt": "a"}'


def test_of_a_large_set_the_first_rows_are_checked_before_the_run(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "x"}\n' * CHECKED_ROWS + "not JSON\n")
    assert len(check_data(DataSettings(path=str(path))).prompts) == CHECKED_ROWS


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


def mixed(folder: Path, sizes: tuple[int, ...], seed: int = 1, **settings: Any) -> PromptSource:
    paths = [folder / f"{number}.jsonl" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_text("".join(json.dumps({"prompt": f"{path.stem}-{i}"}) + "\n" for i in range(size)))
    return open_prompts(DataSettings(path=tuple(map(str, paths)), **settings), seed)


def prompts_of(pool: PromptSource, cursors: range) -> list[str]:
    return [json.loads(pool.row(pool.group_at(cursor)))["prompt"] for cursor in cursors]


def test_several_files_are_mixed_and_each_row_comes_once_in_an_epoch(tmp_path: Path):
    prompts = prompts_of(mixed(tmp_path, (5, 20, 3)), range(28))
    assert len(set(prompts)) == 28 and prompts != sorted(prompts)


def test_weights_are_the_shares_of_the_files_whose_epochs_are_their_own(tmp_path: Path):
    prompts = prompts_of(mixed(tmp_path, (4, 96), weights=(3.0, 1.0)), range(1000))
    of_first = [prompt for prompt in prompts if prompt.startswith("0-")]
    assert len(of_first) == 750
    assert all(len(set(of_first[i : i + 4])) == 4 for i in range(0, 748, 4))
    assert len({prompt for prompt in prompts if prompt.startswith("1-")}) == 96


def test_a_small_weight_keeps_its_share_however_few_the_rows_are(tmp_path: Path):
    prompts = prompts_of(mixed(tmp_path, (5, 5), weights=(99.0, 1.0)), range(2000))
    assert len([prompt for prompt in prompts if prompt.startswith("1-")]) == 20


def test_a_weight_that_is_nearly_nothing_is_refused(tmp_path: Path):
    mixed(tmp_path, (1, 1))
    settings = DataSettings(path=(str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")), weights=(1.0, 1e-9))
    with pytest.raises(SettingError, match=r"data\.weights: 1e-09 is less than a millionth of their sum"):
        check_data(settings)


def test_the_cursor_and_the_seed_alone_decide_what_comes_next(tmp_path: Path):
    first, again, other = (mixed(tmp_path, (4, 7), seed=seed, weights=(1.0, 2.0)) for seed in (1, 1, 2))
    groups = [first.group_at(cursor) for cursor in range(200)]
    assert [again.group_at(cursor) for cursor in reversed(range(200))] == groups[::-1]
    assert [other.group_at(cursor) for cursor in range(200)] != groups
    assert len(set(groups)) == 200


@pytest.mark.parametrize("weights", [(1.0,), (0.0, 0.0), (1.0, 1.0, 1.0)])
def test_weights_that_do_not_fit_the_files_name_their_setting(tmp_path: Path, weights: tuple[float, ...]):
    mixed(tmp_path, (1, 1))
    settings = DataSettings(path=(str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")), weights=weights)
    with pytest.raises(SettingError, match=r"data\.weights: \d weights, not all 0, for 2 sets"):
        check_data(settings)


def test_a_mistake_in_one_of_several_files_names_the_file_and_the_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(SettingError, match=r"b\.jsonl:2 has no `prompt` column"):
        check_data(DataSettings(path=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))))


def test_a_column_of_objects_without_a_text_is_refused_by_name():
    assert as_json({"when": date(2026, 1, 2)}) == b'{"when": "2026-01-02"}'
    with pytest.raises(SettingError, match=r"data\.path: the column image has values that JSON cannot hold"):
        as_json({"prompt": "p at 0x1>", "level": float("nan"), "image": object()})
