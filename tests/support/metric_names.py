"""The names of metrics that docs/use/metrics.md explains."""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from support.source_tree import ROOT

PAGE = ROOT / "docs" / "use" / "metrics.md"
_ROW = re.compile(r"^\| (`[^|]+`) \| [^|]+ \|$", re.MULTILINE)
_QUOTED = re.compile(r"`([^`]+)`")
_PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
NOT_METRICS = {"step", "time_s"}
"""Fields of a line that say when it was written."""


@cache
def explained() -> dict[str, re.Pattern[str]]:
    """Each name of the tables of all metrics, written in full, and the pattern of what it stands for: NAME and its like are any word."""
    _, _, tables = PAGE.read_text().partition("## All of them")
    found: dict[str, re.Pattern[str]] = {}
    for cell in _ROW.findall(tables):
        folder = ""
        for name in _QUOTED.findall(cell):
            full = f"{folder}{name}" if name.startswith("/") else name
            if not name.startswith("/"):
                folder = name.rpartition("/")[0]
            parts = [
                r"[^/]+" if _PLACEHOLDER.fullmatch(part) else re.escape(part) for part in re.split(r"([/@])", full)
            ]
            found[full] = re.compile("".join(parts))
    return found


def names_in(metrics: Path) -> set[str]:
    """The names of a run's `metrics.jsonl`."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {name for line in lines for name in json.loads(line)} - NOT_METRICS


def unexplained(names: Iterable[str]) -> set[str]:
    """Those of the names that the page does not explain."""
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in explained().values())}
