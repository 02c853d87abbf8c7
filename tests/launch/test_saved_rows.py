"""Saved rows against the journal of their run."""

from pathlib import Path

import pytest

from headrace.launch.report import saved_rows


def test_of_a_run_under_way_the_rows_are_read_before_the_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What a row is made of is in the journal before the row is saved; what is saved later is not compared."""
    read: list[str] = []

    def noted(name: str):
        def work(*_: object, **__: object) -> list[object]:
            read.append(name)
            return []

        return work

    monkeypatch.setattr(saved_rows, "saved_steps", noted("rows"))
    monkeypatch.setattr(saved_rows, "published_in", noted("versions"))
    monkeypatch.setattr(saved_rows, "read_events", noted("rows of the journal"))
    assert [*saved_rows.check_rows(tmp_path, tmp_path)] == []
    assert read == ["rows", "versions", "rows of the journal"]
