"""Opens what `data.path` names.

Rows come from a JSONL file, a parquet file or a Hugging Face data set, each when its turn comes. JSONL needs no extra package. For the
other forms the `datasets` library reads. Rows of a user's Python file are made.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...comm.errors import SettingError
from ...comm.recipe import DataSettings
from .prompt_rows import in_form
from .rows import BYTE_ORDER_MARK, DatasetRows, JsonLines, row_problem
from .tables import TableRows, load_table
from .user_rows import UserRows, is_python

CHECKED_ROWS = 1 << 16
"""Rows of a set that are checked before the run; a later row is checked when its turn comes."""
_CHECKED_MADE = 256
"""Rows of a Python file that are checked, since each may take long to make."""
FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".bz2", ".xz", ".zst", ".zip")
"""Endings of files; another dot is part of a name on the Hub, such as `NuminaMath-1.5`."""
_START_BYTES = 1 << 10
_TABLES = (".csv", ".tsv")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def open_rows(settings: DataSettings) -> DatasetRows:
    """The rows of one file or data set, as `data.*` describes them. Raises `SettingError` if they cannot be read or are empty."""
    (name,) = settings.paths
    path = Path(name)
    is_table = path.suffix == ".parquet" or path.is_dir()
    is_hub_id = not path.exists() and path.suffix not in FILES and not path.is_absolute() and name.count("/") <= 1
    if is_python(name):
        rows = UserRows(name)
    else:
        if not (is_table or is_hub_id):
            _check_format(path)
        rows = TableRows(load_table(settings, name)) if is_table or is_hub_id else JsonLines(path)
    if not len(rows):
        raise SettingError(f"data.path: {name} has no rows")
    return in_form(rows, settings)


def _check_format(path: Path) -> None:
    """Raise `SettingError` for a file in another form than JSONL, with what to give instead."""
    if not path.is_file():
        return
    alone = "give it as JSONL, one JSON object in each line, or put it into a folder of its own and name the folder"
    if path.suffix in _TABLES:
        raise SettingError(
            f"data.path: {path} is a {path.suffix[1:].upper()} file, which is not read by itself; {alone}"
        )
    if path.suffix in _COMPRESSED:
        raise SettingError(
            f"data.path: {path} is compressed ({path.suffix}); unpack it first, or put it into a folder of its own and name the folder"
        )
    try:
        with path.open("rb") as file:
            start = file.read(_START_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
    except OSError:  # told by the reader
        return
    if start.startswith(b"["):
        raise SettingError(f"data.path: {path} is one JSON list, which is not read by itself; {alone}")


def checked_prompts(
    rows: DatasetRows, path: str, column: str = "prompt", most: int | None = None
) -> Iterator[str | list[Any]]:
    """The prompt of each of the first rows, at most `most` and `CHECKED_ROWS`: text, or a list of chat messages.

    Raises `SettingError` at the first row without one.
    """
    limit = _CHECKED_MADE if is_python(path) else CHECKED_ROWS
    for index in range(min(len(rows), most or limit, limit)):
        row = rows[index]
        if problem := row_problem(row, column):
            raise SettingError(f"data.path: {path}:{index + 1} {problem}")
        yield msgspec.json.decode(row)["prompt"]
