"""The rows that a run has read from a stream, in a file of the run folder: what resume and replay see is what the run saw."""

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...comm.disk import AppendFile
from ...comm.errors import SettingError

STREAM_FILE = "stream.jsonl"
"""Its name in the run folder."""
MARK = b"#"
"""Begins the lines that are not rows."""


class Mark(msgspec.Struct, frozen=True):
    """A place in the stream: an epoch, and the library's own state there; a state of None is the epoch's beginning."""

    epoch: int = 0
    state: dict[str, Any] | None = None


class StreamFile:
    """JSON lines. The first one, `#` and JSON, has the settings of the stream, and others of this form are marks between rows.

    A row is named by its number in the file. One thread appends, any thread reads. A last line without an end, whose writer
    died, is cut off when the file is opened. Raises `SettingError` for a file of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], deadline_s: float) -> None:
        """`settings` by their names, from which the order of the rows follows. `deadline_s` bounds the wait for room on a full disk."""
        self.path = path
        self.epochs = [0]
        """The row that begins each epoch so far."""
        self.mark = Mark()
        """The last mark."""
        self.num_marked = 0
        """Rows before the last mark."""
        self._file = AppendFile(path, deadline_s, durable=True)
        self._reader = os.open(path, os.O_RDONLY)
        self._starts, self._num_bytes = array("q"), 0
        found = self._scan()
        os.ftruncate(self._file.descriptor, self._num_bytes)
        for name, value in settings.items() if found else ():
            if found.get(name) != value:
                self.close()
                raise SettingError(f"{name}: the stream of the run in {path.parent} began with {found.get(name)!r}")
        if not found:
            self._write(_line_of(settings))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int, /) -> bytes:
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self._starts) else self._num_bytes
        return os.pread(self._reader, end - start, start).partition(b"\n")[0]

    def append(self, mark: Mark, rows: Sequence[bytes] = ()) -> None:
        """Write a mark and the rows that follow it; they are on the disk before they can be read. Raises `DiskFull` or `OSError`."""
        head = _line_of(mark)
        place = self._num_bytes + len(head)
        self._write(head + b"".join(row + b"\n" for row in rows))
        self._note(mark)
        for row in rows:
            self._starts.append(place)
            place += len(row) + 1

    def stop_waiting(self) -> None:
        """From now on a full disk is an error at once. Called from any thread."""
        self._file.gives_up.set()

    def close(self) -> None:
        self._file.close()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    def _write(self, lines: bytes) -> None:
        self._file.append(lines)
        self._num_bytes += len(lines)

    def _note(self, mark: Mark) -> None:
        self.mark, self.num_marked = mark, len(self._starts)
        if mark.epoch == len(self.epochs):
            self.epochs.append(len(self._starts))

    def _scan(self) -> dict[str, Any]:
        """Find the rows and marks of the file; returns the settings of its first line, empty for a file without one."""
        settings: dict[str, Any] = {}
        with os.fdopen(os.dup(self._reader), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if not line.startswith(MARK):
                    self._starts.append(self._num_bytes)
                elif self._num_bytes:
                    self._note(msgspec.json.decode(line[1:], type=Mark))
                else:
                    settings = msgspec.json.decode(line[1:])
                self._num_bytes += len(line)
        return settings


def _line_of(record: Mark | dict[str, Any]) -> bytes:
    return MARK + msgspec.json.encode(record) + b"\n"
