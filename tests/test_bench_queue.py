"""The benchmark of the queue is itself right: nothing lost under load, and rows that say what was measured."""

import json
from pathlib import Path

import pytest

from headrace.launch.bench.__main__ import main
from headrace.launch.bench.storage_load import load


@pytest.mark.slow
def test_many_writers_and_readers_lose_nothing():
    rows = {row.workload: row for row in load(seconds=8)}
    assert rows["load-rows"].value > 0 and rows["load-rows"].ratio == 1
    assert rows["load-memory"].ratio < 1.5


def test_a_journal_is_replayed_and_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["--only", "units", "journal-replay", "--events", "3000", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["workload"]: row["unit"] for row in rows} == {"journal-replay": "s"}
    assert "units: left out" in capsys.readouterr().out
