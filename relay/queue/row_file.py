"""Files of rows, in one form: safetensors with the columns of each row as `KEY/COLUMN`; the metadata has a list of them in JSON.

A writer may add entries to the list: the trainer does for the rows of a step, a relay for the saved queue.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...comm.disk import raise_if_unwritable
from ...comm.errors import SettingError
from ..checkpoints import share_by_umask

T = TypeVar("T")

_LIST = "list"


def write_rows(path: Path, rows: Mapping[str, Mapping[str, np.ndarray]], listed: msgspec.Struct) -> None:
    """Write a file into a folder that exists. It has its name once it is whole; an `OSError` leaves nothing."""
    columns = {f"{key}/{name}": column for key, row in rows.items() for name, column in row.items()}
    new = path.with_suffix(".new")
    try:
        save_file(columns, new, {_LIST: msgspec.json.encode(listed).decode()})
        share_by_umask(new)
        new.replace(path)
    except (OSError, SafetensorError) as error:
        try:
            raise_if_unwritable(path.parent)
        finally:
            new.unlink(missing_ok=True)
        raise OSError(*error.args) from error


class RowFile(Generic[T]):
    """A file for reading, whose list is a `kind`. Raises `SettingError` if it is damaged or has no list."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._names: dict[str, list[str]] = defaultdict(list)
        with self.named_errors():
            self._file = safe_open(path, framework="numpy")
            if (listed := (self._file.metadata() or {}).get(_LIST)) is None:
                raise SettingError(
                    f"run.dir: {path} has no list of its rows; it was written by another version of Headrace"
                )
            self.listed = msgspec.json.decode(listed, type=kind)
            for tensor in self._file.keys():  # noqa: SIM118 - not a mapping
                key, _, name = tensor.rpartition("/")  # a key may have a "/", a column has none
                self._names[key].append(name)

    def read(self, keys: Iterable[str] | None = None) -> dict[str, dict[str, np.ndarray]]:
        """The columns of rows, of all without `keys`."""
        with self.named_errors():
            return {
                key: {name: self._file.get_tensor(f"{key}/{name}") for name in self._names[key]}
                for key in (list(self._names) if keys is None else keys)
            }

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Errors of what the file holds become `SettingError`, which names it."""
        try:
            yield
        except SettingError:
            raise
        except (
            OSError,
            SafetensorError,
            msgspec.MsgspecError,
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
        ) as error:
            raise SettingError(f"run.dir: {self._path} is damaged: {error}") from error
