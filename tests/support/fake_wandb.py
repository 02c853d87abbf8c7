"""A stand-in for the package of Weights & Biases, and what it was called with."""

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.record.trackers.feed import TrackerFeed

WANDB = """
    import json, os, sys, time
    from pathlib import Path

    CALLS = Path(os.environ["CALLS"])
    print(f"the output of a package", flush=True)
    assert sys.stdin.read() == "", "a package that asks gets no answer"
    FAILS, BLOCKS = os.environ.get("FAILS", ""), os.environ.get("BLOCKS", "")

    def note(call, **facts):
        with CALLS.open("a") as file:
            file.write(json.dumps([call, facts]) + "\\n")
        while call in BLOCKS.split():
            time.sleep(0.01)
        if call in FAILS.split():
            raise OSError("no route to host")

    class Settings(dict):
        pass

    def Histogram(np_histogram):
        return np_histogram

    Html = str

    class Run:
        summary = {}

        def define_metric(self, name, step_metric):
            pass

        def log(self, values, step):
            note("log", step=step, values=values)

        def finish(self, exit_code):
            note("finish", exit_code=exit_code, summary=self.summary)

    def init(**given):
        note("init", **{name: given[name] for name in ("project", "name", "id", "dir", "resume", "config")})
        return Run()

    def teardown():
        pass
"""
"""Stands in for the package: what it is called with goes to a file."""


class FakeWandb:
    """The package of the stand-in, and what it was called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = folder / "calls.jsonl"
        self._monkeypatch = monkeypatch
        (folder / "packages").mkdir()
        (folder / "packages/wandb.py").write_text(textwrap.dedent(WANDB))
        self.set(CALLS=self._calls, PYTHONPATH=f"{folder / 'packages'}:{os.environ.get('PYTHONPATH', '')}")
        for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_DIR"):
            monkeypatch.delenv(name, raising=False)
        self.run_dir = folder / "sums"
        self.run_dir.mkdir()

    def set(self, **variables: object) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, str(value))

    def calls(self, name: str) -> list[dict[str, Any]]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [facts for call, facts in map(json.loads, lines) if call == name]

    @property
    def steps(self) -> list[int]:
        return [call["step"] for call in self.calls("log")]

    def open(self, past_bytes: int = 0, most_bytes: int = 1 << 20) -> TrackerFeed:
        feed = TrackerFeed("wandb", self.run_dir, past_bytes, most_bytes)
        feed.begin({"run.steps": 4}, {})
        return feed
