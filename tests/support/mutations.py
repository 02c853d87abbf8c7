"""The lists of mutations: mistakes that a change could make, each with the tests that should find it.

A list is a TOML file of tables `[[mutation]]`: `name` (a sentence: what is wrong then), `file`, `before` (text that the file has
exactly once), `after` (the text instead), `tests` (files of tests or tests, as pytest names them; fast ones). A mistake in several
places of the file has lists as `before` and `after`.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

MUTATIONS = Path(__file__).resolve().parents[1] / "mutations"


@dataclass(frozen=True)
class Mutation:
    """One mistake in one file, as the module's docstring says."""

    name: str
    file: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the file with the mistake in it."""
        for before, after in zip(self.before, self.after, strict=True):
            assert text.count(before) == 1, f"{self.file} has {before!r} {text.count(before)} times"
            text = text.replace(before, after)
        return text


def mutations(folder: Path = MUTATIONS) -> list[Mutation]:
    """All mutations of the lists in a folder."""
    tables = [table for path in sorted(folder.glob("*.toml")) for table in tomllib.loads(path.read_text())["mutation"]]
    return [Mutation(t["name"], t["file"], *(_tuple(t[key]) for key in ("before", "after", "tests"))) for t in tables]


def _tuple(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
