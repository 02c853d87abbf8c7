"""Rows by index, each a JSON object: those of a JSONL file, and whether a row can be used."""

import json
import math
import os
import re
import weakref
from array import array
from pathlib import Path
from typing import Any, Protocol

import msgspec
from xxhash import xxh3_64

from ...comm.errors import SettingError

MAX_ROW_BYTES = 2 << 20
"""Most bytes of one row as JSON: it travels in a message."""
MAX_NESTED = 100
"""Most lists and objects of one value one inside the other. Readers and writers of JSON fail near 1,000, at a depth of their own each."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_BLOCK_BYTES = 1 << 20
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
"""Part of the text of an object that has no text of its own."""
_TOO_DEEP = f"has more than {MAX_NESTED} nested lists or objects"
_NOT_FINITE = re.compile(rb"\b(NaN|Infinity)\b")


class DatasetRows(Protocol):
    """Rows by index, each the bytes of one JSON object."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...


class JsonLines:
    """A JSONL file, of which the places of its lines are in memory: 8 bytes a row. The file stays open and must not change.

    A row of a file whose bytes have changed since, or that cannot be read, is a `SettingError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("q")
        place = 0
        digest = xxh3_64()
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._stamp = _stamp(self._file)
            with os.fdopen(os.dup(self._file), "rb") as file:
                for line in file:
                    if line.strip(_BLANK if place else _BLANK + BYTE_ORDER_MARK):
                        self._starts.append(place)
                    place += len(line)
                    digest.update(line)
        except FileNotFoundError:
            raise SettingError(f"data.path: {path} does not exist") from None
        except OSError as error:
            raise SettingError(f"data.path: cannot read {path}: {error.strerror}") from error
        self._starts.append(place)
        self._digest = digest.digest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int, /) -> bytes:
        start = self._starts[index]
        end = self._starts[index + 1]
        try:
            line = os.pread(self._file, end - start, start)
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._check_bytes(stamp)
        except OSError as error:
            raise SettingError(f"data.path: cannot read {self._path}: {error.strerror}") from error
        return line.removeprefix(BYTE_ORDER_MARK).strip(_BLANK)

    def _check_bytes(self, stamp: tuple[int, int]) -> None:
        """Accept a new modification time of the same bytes, as `touch` sets it. Reads the file once."""
        digest = xxh3_64()
        place = 0
        while block := os.pread(self._file, _BLOCK_BYTES, place):
            digest.update(block)
            place += len(block)
        if digest.digest() != self._digest:
            raise SettingError(
                f"data.path: {self._path} has changed since the run began; put other rows into another file"
            )
        self._stamp = stamp


def row_problem(raw: bytes, column: str = "prompt") -> str:
    """Why a row cannot be used, as the end of a sentence that begins with its name; empty if it can. `column` is in the sentence."""
    if len(raw) > MAX_ROW_BYTES:
        return f"has {len(raw)} bytes; at most {MAX_ROW_BYTES} fit"
    try:
        row = msgspec.json.decode(raw)  # as its readers will
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; JSON has no NaN and no Infinity: write null" if _NOT_FINITE.search(raw) else ""
        return f"is not JSON ({error}){hint}"
    except RecursionError:
        return _TOO_DEEP
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTED and is_too_deep(row):
        return _TOO_DEEP
    if not isinstance(row, dict) or "prompt" not in row:
        has = f"it has {', '.join(row)}" if isinstance(row, dict) and row else "it is not an object with columns"
        return f"has no `{column}` column; {has}; see data.prompt_column"
    if not isinstance(row["prompt"], str | list):
        return f"has a `{column}` that is neither text nor a list of chat messages"
    return "" if row["prompt"] else f"has an empty `{column}`"


def is_too_deep(value: Any) -> bool:
    """Whether a list or object of JSON has more than `MAX_NESTED` lists and objects one inside the other."""
    level = [value]
    for _ in range(MAX_NESTED):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [each for values in inner for each in values if isinstance(each, list | tuple | dict)]
        if not level:
            return False
    return True


def _stamp(file: int) -> tuple[int, int]:
    """Size and time of the last change of an open file."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def as_json(row: dict[str, Any]) -> bytes:
    """A row as one line of JSON. Values that JSON lacks are text, numbers that are not finite are null.

    Raises `SettingError` for a column of objects such as images, whose text is another one each time.
    """
    try:
        return _dumped(row)
    except TypeError:
        for name, value in row.items():
            try:
                _dumped({name: value})
            except TypeError:
                raise SettingError(
                    f"data.path: the column {name} has values that JSON cannot hold, such as images; use a data set without it"
                ) from None
        raise


def _dumped(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, default=_as_text, allow_nan=False).encode()
    except ValueError:  # a table's missing numbers are NaN, which JSON lacks
        return json.dumps(_without_nan(row), default=_as_text).encode()


def _as_text(value: Any) -> str:
    if _ADDRESS.search(text := str(value)):
        raise TypeError(text)
    return text


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _without_nan(each) for key, each in value.items()}
        case list():
            return [_without_nan(each) for each in value]
        case _:
            return value
