"""The lists of mutations: mistakes that a change could make, each with the tests that should find it.

A list is a TOML file of tables `[[mutation]]`: `name` (a sentence: what is wrong then), `file`, `before` (text that the file has
exactly once), `after` (the text instead), `tests` (files of tests or tests, as pytest names them; fast ones).
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
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the file with the mistake in it."""
        assert text.count(self.before) == 1, f"{self.file} has {self.before!r} {text.count(self.before)} times"
        return text.replace(self.before, self.after)


def mutations(folder: Path = MUTATIONS) -> list[Mutation]:
    """All mutations of the lists in a folder."""
    tables = [table for path in sorted(folder.glob("*.toml")) for table in tomllib.loads(path.read_text())["mutation"]]
    return [Mutation(**{**table, "tests": tuple(table["tests"])}) for table in tables]
