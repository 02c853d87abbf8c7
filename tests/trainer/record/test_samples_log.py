"""The record of samples never ends a run, except where the disk is full."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.actors import batch_of, recipe_of
from support.policies import tiny_policy

from headrace.comm.errors import DiskFull
from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.record.metrics_log import MetricsLog
from headrace.trainer.record.samples_log import SamplesLog
from headrace.trainer.record.shown_rows import ShownRows


class Failing:
    """Raises at each call of one of its methods."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def fails(self, *_: Any) -> None:
        raise self.error

    write = write_text = fails


def open_log(folder: Path, open_tokenizer: Any, board: Any = None) -> SamplesLog:
    recipe = recipe_of(folder, **{"run.dir": folder})
    metrics = cast(MetricsLog, board or SimpleNamespace(write_text=lambda *_: None))
    return SamplesLog(recipe, 0, metrics, open_tokenizer)


def rows_of(step: int) -> ShownRows:
    rows = ShownRows(1)
    rows.add(batch_of(step))
    return rows


def no_module() -> Any:
    raise ImportError("sentencepiece\nis missing")


@pytest.mark.parametrize("kind", ["of another kind", "not loaded"])
def test_a_tokenizer_that_cannot_be_used_is_said_once_and_no_samples_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    log = open_log(tmp_path, no_module if kind == "not loaded" else object)
    for step in range(3):
        log.write(step, rows_of(step))
        log.show(step)
    said = capsys.readouterr().out
    assert said.count("no samples are recorded") == said.count("\n") == 1
    assert not (tmp_path / "samples.jsonl").exists()


def test_a_step_whose_samples_cannot_be_made_is_left_out_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = tiny_policy(tmp_path, "llama")
    log = open_log(folder, lambda: load_tokenizer(folder))
    assert log._lines is not None
    fields = log._lines.fields

    def only_the_last(step: int, *given: Any, **named: Any) -> dict[str, Any]:
        return fields(step, *given, **named) if step == 2 else {"step": step + 1, "prompt": "\ud83d"}

    monkeypatch.setattr(log._lines, "fields", only_the_last)
    for step in range(3):
        log.write(step, rows_of(step))
        log.show(step)
    log.close()
    assert capsys.readouterr().out.count("warning: step 1 has no samples") == 1
    assert [line[:9] for line in (folder / "samples.jsonl").read_bytes().splitlines()] == [b'{"step":3'] * 3


@pytest.mark.parametrize("error", [DiskFull("full"), ValueError("a record that is too long")])
def test_only_a_full_disk_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception):
    folder = tiny_policy(tmp_path, "llama")
    log = open_log(folder, lambda: load_tokenizer(folder), Failing(error))
    log.write(0, rows_of(0))
    whole = log._file
    for act in (lambda: log.show(0), lambda: log.write(1, rows_of(1))):
        if isinstance(error, DiskFull):
            with pytest.raises(DiskFull):
                act()
        else:
            act()
        log._file = cast(Any, Failing(error))
    whole.close()
    assert capsys.readouterr().out.count("warning: ") == isinstance(error, ValueError)
