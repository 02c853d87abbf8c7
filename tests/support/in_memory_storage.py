"""Rows in the memory of one process, with the interface of `StorageClient`, for tests without a unit."""

import threading
from collections.abc import Iterable, Mapping

import numpy as np

from headrace.comm.storage.client import Columns
from headrace.comm.storage.codec import refuse_objects


class MemoryRows:
    """Both `put` and `get` copy, so a column never changes while it is read."""

    address = "memory"

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, columns: Columns) -> int:
        """Add columns to a row."""
        return self.put_many({key: columns})

    def put_many(self, rows: Mapping[str, Columns]) -> int:
        """Add columns to several rows at once."""
        copies = {key: _copied(columns) for key, columns in rows.items()}
        with self._lock:
            for key, columns in copies.items():
                self._rows.setdefault(key, {}).update(columns)
        return sum(column.nbytes for columns in copies.values() for column in columns.values())

    def get(self, key: str, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """A row's columns, all or those named."""
        return self.get_many([key], columns)[key]

    def get_many(self, keys: Iterable[str], columns: Iterable[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
        """Columns of several rows."""
        names = None if columns is None else list(columns)
        with self._lock:
            found = {key: self._rows[key] for key in keys}
            chosen = {key: {n: row[n] for n in (row if names is None else names)} for key, row in found.items()}
        return {key: {name: column.copy() for name, column in row.items()} for key, row in chosen.items()}

    def drop(self, keys: Iterable[str]) -> int:
        """Drop rows."""
        with self._lock:
            return sum(self._rows.pop(key, None) is not None for key in keys)

    def listing(self) -> list[str]:
        """The keys of the rows held."""
        with self._lock:
            return list(self._rows)

    def has(self, key: str, column: str) -> bool:
        """Whether a row has a column."""
        with self._lock:
            return column in self._rows.get(key, ())

    def close(self) -> None:
        """No connection to end."""


def _copied(columns: Columns) -> dict[str, np.ndarray]:
    for name, column in columns.items():
        refuse_objects(name, column)
    return {name: np.array(column) for name, column in columns.items()}
