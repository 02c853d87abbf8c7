"""Data sets of the `datasets` library: parquet files, folders and ids of the Hugging Face Hub.

The library reads, caches and memory-maps them; as streams they are read over the network in their order.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...comm.errors import SettingError
from .rows import as_json

if TYPE_CHECKING:
    from ...comm.recipe import DataSettings

_FILES = {".parquet": "parquet", ".jsonl": "json"}
"""The library's readers of single files, by their ending."""


class TableRows:
    """A data set of the `datasets` library, by index."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> bytes:
        return as_json(self._table[index])


def load_table(settings: "DataSettings", name: str) -> Any:
    """The library's data set of a file, folder or id; an iterable one with `data.streaming`. Raises `SettingError`."""
    path, streaming = Path(name), settings.streaming
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise SettingError(
            f"data.path: {name} needs the `datasets` package, as parquet files, Hugging Face data sets and streams do:"
            " pip install datasets"
        ) from None
    datasets.disable_progress_bars()
    try:
        if (kind := _FILES.get(path.suffix)) is not None:
            return datasets.load_dataset(kind, data_files=name, split="train", streaming=streaming)
        if (path / "dataset_info.json").exists():
            table = datasets.load_from_disk(name)
            return table.to_iterable_dataset() if streaming else table  # pyright: ignore[reportAttributeAccessIssue]
        return datasets.load_dataset(name, settings.subset or None, split=settings.split, streaming=streaming)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        # The library raises these for a wrong name, split or file.
        raise _cannot_read(name, error) from error


def first_rows(settings: "DataSettings", name: str, most: int) -> list[bytes]:
    """The first rows of a stream. Raises `SettingError`, also for an error of the library while it reads them."""
    stream = load_table(settings, name)
    try:
        return [as_json(row) for row in stream.take(most)]
    except Exception as error:
        raise _cannot_read(name, error) from error


def _cannot_read(name: str, error: Exception) -> SettingError:
    told = str(error.__cause__ or error) or type(error).__name__
    return SettingError(f"data.path: cannot load {name}: {told.splitlines()[0]}")
