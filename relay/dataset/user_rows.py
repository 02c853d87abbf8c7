"""Rows that a user's Python file makes: `FILE.py:NAME` in `data.path`."""

import json
import traceback
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from ...comm.errors import SettingError
from ...comm.plugins import load_object


def is_python(path: str) -> bool:
    """Whether an entry of `data.path` names a Python file."""
    return path.partition(":")[0].endswith(".py")


class UserRows:
    """The rows of an object with `__len__` and `__getitem__`; each is made when it is read. 8 bytes a row are kept, for its digest.

    An error of the user's code is a `SettingError` with its line, and so is a row that has changed when it is read again.
    """

    def __init__(self, path: str) -> None:
        file, _, name = path.partition(":")
        self._path = path
        self._file = Path(file)
        if not name.isidentifier():
            raise SettingError(f"data.path: {path} is not of the form FILE.py:NAME")
        if not self._file.is_file():
            raise SettingError(f"data.path: {file} does not exist")
        with self._told(""):
            self._rows = _made(load_object("data.path", path))
        if missing := [each for each in ("__len__", "__getitem__") if not hasattr(type(self._rows), each)]:
            raise SettingError(
                f"data.path: {path} has no {missing[0]}; rows are counted with __len__ and read with __getitem__, from index 0"
            )
        with self._told(""):
            self._digests = array("Q", bytes(8 * len(self._rows)))
        if self._digests:
            self[0]  # its second read tells before the run whether rows depend on chance

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, index: int, /) -> bytes:
        where = f"row {index + 1}"
        with self._told(f"{where}: "):
            row = self._rows[index]
        if not isinstance(row, dict):
            raise SettingError(f"data.path: {self._path}: {where} is a {type(row).__name__}, not a dict of columns")
        try:
            made = json.dumps(row, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingError(f"data.path: {self._path}: {where} is not JSON: {error}") from error
        before = self._digests[index]
        self._digests[index] = xxh3_64_intdigest(made)
        if before not in (0, self._digests[index]):
            raise SettingError(
                f"data.path: {self._path}: {where} has changed since it was first read; a row must depend on its index alone"
            )
        return made

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Raise an error of the user's code as a `SettingError` with the line of the file at which it was."""
        try:
            yield
        except SettingError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit would end this process without a word
            file = str(self._file.resolve())
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            line = f" ({self._file}:{lines[-1]})" if lines else ""
            reason = next(iter(str(error).splitlines()), "")
            raise SettingError(f"data.path: {self._path}: {where}{type(error).__name__}: {reason}{line}") from error


def _made(named: Any) -> Any:
    """The rows behind a name in the file: the object itself, or the result of calling a class or function."""
    has_rows = hasattr(type(named), "__getitem__")
    return named() if callable(named) and not has_rows else named
