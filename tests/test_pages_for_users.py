"""What the pages for users claim is true of the program: its messages, its names, its settings."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.source_tree import ROOT, SOURCES, TREES

USE = ROOT / "docs" / "use"
ROW = re.compile(r"^\| (?!you see|---)(.+?) \|", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")


@cache
def texts(path: Path) -> list[str]:
    """The texts of a source file, with `...` for the expressions in them."""
    found: list[str] = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def quoted_messages() -> Iterator[str]:
    """The messages in the first column of the tables, which have a space; names of settings and metrics have none."""
    page = (USE / "troubleshooting.md").read_text()
    return (text for cell in ROW.findall(page) for text in QUOTED.findall(cell) if " " in text)


def fragments(message: str) -> list[str]:
    return [part for part in (piece.strip(" ;:,") for piece in message.split("...")) if part]


@pytest.mark.parametrize("message", [*quoted_messages()])
def test_a_message_that_the_troubleshooting_quotes_is_one_of_the_programs(message: str):
    """All of its fixed parts are in the texts of one file."""
    parts = fragments(message)
    assert parts and any(all(any(part in text for text in texts(path)) for part in parts) for path in SOURCES), parts
