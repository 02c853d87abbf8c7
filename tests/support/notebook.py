"""A notebook without IPython: its cells share their names, and Python knows their lines."""

import itertools
import linecache
import textwrap
from typing import Any

_numbers = itertools.count()


class Notebook:
    """Runs cells as IPython does: each is compiled under a name of its own, whose lines `linecache` knows."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def cell(self, text: str) -> "Notebook":
        text = textwrap.dedent(text)
        name = f"<cell-{next(_numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), self.names)  # noqa: S102 - as IPython does
        return self
