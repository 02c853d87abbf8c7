"""Data sets of the `datasets` library: parquet files, folders and ids of the Hugging Face Hub.

The library reads, caches and memory-maps them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...comm.errors import SettingError
from .rows import as_json

if TYPE_CHECKING:
    from ...comm.recipe import DataSettings


class TableRows:
    """A data set of the `datasets` library, by index."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> bytes:
        return as_json(self._table[index])


def load_table(settings: "DataSettings", name: str) -> Any:
    """The library's data set of a file, folder or id. Raises `SettingError`."""
    path = Path(name)
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise SettingError(
            f"data.path: {name} needs the `datasets` package, as parquet files and Hugging Face data sets do:"
            " pip install datasets"
        ) from None
    datasets.disable_progress_bars()
    try:
        if path.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files=name, split="train")
        if (path / "dataset_info.json").exists():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, settings.subset or None, split=settings.split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        # The library raises these for a wrong name, split or file.
        told = str(error.__cause__ or error) or type(error).__name__
        raise SettingError(f"data.path: cannot load {name}: {told.splitlines()[0]}") from error
