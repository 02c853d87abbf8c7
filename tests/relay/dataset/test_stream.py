"""A data set that is read as it is used: its rows come in one order, whatever happens between them."""

import errno
import json
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.comm import disk as disk_module
from headrace.comm.errors import SettingError
from headrace.comm.messages.base import GroupId
from headrace.comm.recipe import DataSettings
from headrace.launch.config.data_checks import check_data
from headrace.relay.dataset import stream as stream_module
from headrace.relay.dataset.stream import StreamedPrompts, StreamReader
from headrace.relay.dataset.stream_file import Mark, StreamFile

datasets = pytest.importorskip("datasets", reason="streams need the `datasets` package")

PATIENCE_S = 60.0
FILES, ROWS = 3, 21


@pytest.fixture(params=["parquet", "jsonl"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of several files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for file in range(FILES):
        rows = [{"prompt": f"{file}-{row}"} for row in range(ROWS)]
        path = tmp_path / "set" / f"part-{file}.{request.param}"
        if request.param == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(path, batch_size=8)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "set")


def opened(path: str, run_dir: Path, cursor: int = 0, seed: int = 1, deadline_s: float = 60.0, **settings: Any):
    run_dir.mkdir(exist_ok=True)
    data = DataSettings(path=path, streaming=True, **{"buffer_size": 8, **settings})
    prompts = StreamedPrompts(data, seed, run_dir, deadline_s)
    prompts.start(cursor)
    return closing(prompts)


def group_at(prompts: StreamedPrompts, cursor: int) -> GroupId:
    until = time.monotonic() + PATIENCE_S
    while (group := prompts.group_at(cursor)) is None:
        assert time.monotonic() < until, f"row {cursor} did not come"
        time.sleep(0.01)
    return group


def taken(prompts: StreamedPrompts, cursors: range) -> list[tuple[GroupId, str]]:
    groups = [group_at(prompts, cursor) for cursor in cursors]
    return [(group, json.loads(bytes(prompts.row(group)))["prompt"]) for group in groups]


class Failing:
    """A stream of the library that fails behind some of its rows, as at the end of a connection, each time it is opened."""

    def __init__(self, load: Callable[..., Any], num_rows: int, failures: int) -> None:
        self._load, self._num_rows, self.failures = load, num_rows, failures

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stream = self._load(*args, **kwargs)
        rows = type(stream).__iter__

        def until_it_fails(this: Any) -> Iterator[Any]:
            if self.failures <= 0:
                yield from rows(this)
                return
            self.failures -= 1
            yield from islice(rows(this), self._num_rows)
            raise ConnectionError("the other end is gone")

        stream.__class__ = type("Failing", (type(stream),), {"__iter__": until_it_fails})
        return stream


def test_each_row_comes_once_in_an_epoch_and_the_seed_decides_the_order(folder: str, tmp_path: Path):
    total = FILES * ROWS
    with opened(folder, tmp_path / "a") as prompts:
        first = taken(prompts, range(3 * total))
    names = [prompt for _, prompt in first]
    epochs = [names[i * total : (i + 1) * total] for i in range(3)]
    assert all(len(set(epoch)) == total for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    assert [group.epoch for group, _ in first] == [i // total for i in range(3 * total)]
    assert len({group for group, _ in first}) == 3 * total
    with opened(folder, tmp_path / "b") as same, opened(folder, tmp_path / "c", seed=2) as other:
        assert taken(same, range(total)) == first[:total]
        assert taken(other, range(total)) != first[:total]


def test_without_a_shuffle_the_rows_come_in_the_order_of_the_files(folder: str, tmp_path: Path):
    with opened(folder, tmp_path / "run", shuffle=False) as prompts:
        names = [prompt for _, prompt in taken(prompts, range(2 * FILES * ROWS))]
    assert names == 2 * [f"{file}-{row}" for file in range(FILES) for row in range(ROWS)]


def test_a_stream_continues_with_the_next_row_wherever_it_was_left(folder: str, tmp_path: Path):
    total = 2 * FILES * ROWS + 5
    with opened(folder, tmp_path / "whole") as prompts:
        whole = taken(prompts, range(total))
    found: list[tuple[GroupId, str]] = []
    while len(found) < total:
        with opened(folder, tmp_path / "run", cursor=len(found)) as prompts:
            found += taken(prompts, range(len(found), min(total, len(found) + 13)))
    assert found == whole
    with opened(folder, tmp_path / "run", cursor=40) as prompts:  # as after a step back to an older checkpoint
        assert taken(prompts, range(30, 60)) == whole[30:60]


def test_a_stream_that_continues_reads_few_of_the_rows_before_again(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream_module, "_ROWS_AT_ONCE", 4)
    with opened(folder, tmp_path / "run", shuffle=False) as prompts:
        whole = taken(prompts, range(40))
    read: list[str] = []
    monkeypatch.setattr(
        stream_module, "as_json", lambda row: read.append(row["prompt"]) or json.dumps(row).encode(), raising=True
    )
    with opened(folder, tmp_path / "run", cursor=40, shuffle=False) as prompts:
        assert taken(prompts, range(30, 60))[:10] == whole[30:]
    assert read[0] not in [prompt for _, prompt in whole[:36]]


@pytest.mark.parametrize("end", [b'{"prompt": "half', b"#"])
def test_a_last_line_without_an_end_is_read_again(folder: str, tmp_path: Path, end: bytes):
    with opened(folder, tmp_path / "run") as prompts:
        before = taken(prompts, range(10))
    with (tmp_path / "run" / "stream.jsonl").open("ab") as file:
        file.write(end)
    with opened(folder, tmp_path / "whole") as whole, opened(folder, tmp_path / "run", cursor=10) as prompts:
        assert taken(prompts, range(63)) == taken(whole, range(63)) and taken(prompts, range(10)) == before


def test_a_lost_connection_is_named_and_no_row_is_lost_or_comes_twice(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with opened(folder, tmp_path / "whole") as prompts:
        whole = taken(prompts, range(FILES * ROWS))
    monkeypatch.setattr(stream_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(datasets, "load_dataset", Failing(datasets.load_dataset, 10, failures=3))
    with opened(folder, tmp_path / "run") as prompts:
        assert taken(prompts, range(FILES * ROWS)) == whole
    said = capsys.readouterr().out
    assert said.count("fails (ConnectionError: the other end is gone); it is opened again in") == 3


def test_a_stream_without_a_row_until_the_deadline_is_an_error_that_says_why(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(datasets, "load_dataset", Failing(datasets.load_dataset, 0, failures=1 << 30))
    with (
        opened(folder, tmp_path / "run", buffer_size=5, deadline_s=0.5) as prompts,
        pytest.raises(
            SettingError, match=r"data\.path: the stream .* has given no row for 0\.5 s: ConnectionError: the"
        ),
    ):
        group_at(prompts, 0)


@pytest.mark.parametrize("rows", ['{"prompt": "x"}\n' * 99, '{"prompt": "0-0"}\n'])
def test_a_stream_with_other_rows_than_before_ends_the_run(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str
):
    monkeypatch.setattr(stream_module, "_ROWS_AT_ONCE", 4)
    with opened(folder, tmp_path / "run") as prompts:
        taken(prompts, range(10))
    for path in Path(folder).iterdir():
        path.unlink()
    (Path(folder) / "part-0.jsonl").write_text(rows)
    with (
        opened(folder, tmp_path / "run", cursor=10) as prompts,
        pytest.raises(SettingError, match="has other rows than those that the run has used; set another run.dir"),
    ):
        assert len(taken(prompts, range(10))) == 10
        group_at(prompts, 60)


@pytest.mark.parametrize(
    ("name", "other"), [("data.split", {"split": "test"}), ("data.buffer_size", {"buffer_size": 9})]
)
def test_a_run_continues_only_with_the_settings_of_its_stream(
    folder: str, tmp_path: Path, name: str, other: dict[str, Any]
):
    with opened(folder, tmp_path / "run") as prompts:
        taken(prompts, range(3))
    with pytest.raises(SettingError, match=rf"{name}: the stream of the run in .*run began with "):
        opened(folder, tmp_path / "run", **other)
    with pytest.raises(SettingError, match=r"run\.dir: .*stream\.jsonl has \d+ rows, fewer than the run has used"):
        opened(folder, tmp_path / "run", cursor=10_000)


def test_a_stream_is_checked_before_the_run(folder: str, tmp_path: Path):
    assert len(check_data(DataSettings(path=folder, streaming=True)).prompts) == FILES * ROWS
    with pytest.raises(SettingError, match=r"data\.path: .*:1 has no `question` column"):
        check_data(DataSettings(path=folder, streaming=True, prompt_column="question"))
    with pytest.raises(SettingError, match=r"data\.path: cannot load .*nothing\.parquet"):
        check_data(DataSettings(path=str(tmp_path / "nothing.parquet"), streaming=True))
    with pytest.raises(SettingError, match=r"data\.streaming: data\.path names several sets"):
        check_data(DataSettings(path=(folder, folder), streaming=True))
    with pytest.raises(SettingError, match=r"data\.streaming: tasks of reasoning-gym"):
        check_data(DataSettings(path="reasoning-gym/leg_counting", streaming=True))


def test_rows_that_do_not_come_to_the_disk_are_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_file: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    rows = [b'{"n":%d}' % number for number in range(9)]
    with closing(StreamFile(tmp_path / "stream.jsonl", {}, 1.0)) as file:
        file.append(Mark(), rows[:4])
        with monkeypatch.context() as patched, pytest.raises(OSError, match="broken"):
            patched.setattr(os, "fsync", fail)
            file.append(Mark(0, {"x": 1}), rows[4:6])
        file.append(Mark(0, {"x": 1}), rows[4:])
        assert list(map(file.__getitem__, range(len(file)))) == rows
    with closing(StreamFile(tmp_path / "stream.jsonl", {}, 1.0)) as file:
        assert list(map(file.__getitem__, range(len(file)))) == rows


@pytest.mark.parametrize("num_new", [0, 8])
def test_an_epoch_that_ends_while_a_position_is_looked_up_is_not_mixed_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_new: int
):
    prompts = StreamedPrompts(DataSettings(path="x", streaming=True, buffer_size=4), 0, tmp_path, 1.0)
    with closing(StreamFile(tmp_path / "stream.jsonl", {}, 1.0)) as file:
        monkeypatch.setattr(prompts, "_file", file, raising=False)
        monkeypatch.setattr(
            prompts, "_reader", StreamReader(lambda mark: None, file, lambda: False, "x", 1.0), raising=False
        )
        file.append(Mark(), [b"{}"] * 10)

        def ends(epochs: Any, cursor: int) -> int:
            found = bisect_right(epochs, cursor)
            if len(file.epochs) == 1:
                file.append(Mark(1), [b"{}"] * num_new)
            return found

        monkeypatch.setattr(stream_module, "bisect_right", ends)
        assert prompts.group_at(8) is None, "the end of its block was not known"
        group = prompts.group_at(8)
        assert group is not None and group.epoch == 0 and group.prompt in (8, 9)


def test_a_mark_that_the_library_cannot_read_leads_to_the_beginning_of_its_epoch(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with opened(folder, tmp_path / "whole") as prompts:
        whole = taken(prompts, range(40))
    monkeypatch.setattr(stream_module, "_ROWS_AT_ONCE", 4)
    with opened(folder, tmp_path / "run") as prompts:
        taken(prompts, range(16))
    path = tmp_path / "run" / "stream.jsonl"
    lines = path.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#"))
    lines[last] = "#" + json.dumps(json.loads(lines[last][1:]) | {"state": {"of": "another version"}})
    path.write_text("".join(line + "\n" for line in lines))
    with opened(folder, tmp_path / "run", cursor=16) as prompts:
        assert taken(prompts, range(40)) == whole


class SlowRows:
    """A stream of 9 rows, with 4 s between them on a clock of its own, at each of which the run waits for a row."""

    reader: StreamReader

    def __init__(self) -> None:
        self.now_s, self.waits, self.is_over = 1.0, 0, threading.Event()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(9):
            self.reader.check()
            self.waits += 1
            self.now_s += 4.0
            yield {}
        self.is_over.set()

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_rows_that_are_read_again_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stream = SlowRows()
    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic=lambda: stream.now_s))
    with closing(StreamFile(tmp_path / "stream.jsonl", {}, 1.0)) as file:
        file.append(Mark(), [b"{}"] * 9)
        stream.reader = StreamReader(lambda mark: stream, file, lambda: True, "x", deadline_s=5.0)
        with closing(stream.reader):
            stream.reader.start()
            assert stream.is_over.wait(PATIENCE_S)
    assert stream.waits == 9


def test_a_stream_that_ends_with_the_run_waits_no_longer_for_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_file: int) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    stream, waits = SlowRows(), threading.Event()
    with closing(StreamFile(tmp_path / "stream.jsonl", {}, deadline_s=PATIENCE_S)) as file:
        reader = StreamReader(lambda mark: stream, file, lambda: True, "x", deadline_s=PATIENCE_S)
        stream.reader = reader
        monkeypatch.setattr(disk_module, "say", lambda text: waits.set())
        monkeypatch.setattr(os, "fsync", fail)
        reader.start()
        assert waits.wait(PATIENCE_S)
        reader.stop()
        with pytest.raises(SettingError, match=r"run\.dir is full"):
            until = time.monotonic() + PATIENCE_S / 2
            while time.monotonic() < until:
                reader.check()
                time.sleep(0.01)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_small_set_is_read_one_epoch_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shuffle: bool):
    (tmp_path / "set.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    loaded: list[int] = []
    enough, load, is_short = threading.Event(), stream_module.load_table, vars(StreamedPrompts)["_is_short"]
    monkeypatch.setattr(stream_module, "load_table", lambda *given: loaded.append(1) or load(*given))
    monkeypatch.setattr(StreamedPrompts, "_is_short", lambda self: is_short(self) or enough.set())
    with opened(str(tmp_path / "set.jsonl"), tmp_path / "run", shuffle=shuffle, buffer_size=100) as prompts:
        assert enough.wait(PATIENCE_S)
        assert len(loaded) == 3, "the third epoch is opened, and waits"
        assert group_at(prompts, 0).epoch == 0
        assert prompts.whole_turn == 4, "two epochs have each row among them"
