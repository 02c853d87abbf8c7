"""Columns to bytes and back."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xxhash

from .protocol import Column


def refuse_objects(name: str, column: np.ndarray) -> None:
    """Raise `ValueError` for a column that its dtype and bytes do not describe completely."""
    if column.dtype.hasobject or column.dtype.fields is not None:
        raise ValueError(f"column {name} of {column.dtype}: only plain numbers, strings and raw bytes can be stored")


def encode_columns(columns: Mapping[str, np.ndarray]) -> tuple[tuple[Column, ...], list[np.ndarray]]:
    """Columns in the order in which they are stored, and their bytes as uint8, without a copy where they are contiguous.

    Wider types come first, so every column is aligned without padding. Raises `ValueError` for columns of objects.
    """
    described: list[Column] = []
    raws: list[np.ndarray] = []
    start = 0
    for name, column in sorted(columns.items(), key=lambda item: -item[1].dtype.alignment):
        refuse_objects(name, column)
        data = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        described.append(Column(name, column.dtype.str, column.shape, start, data.nbytes, _digest(data)))
        raws.append(data)
        start += data.nbytes
    return tuple(described), raws


def decode_columns(columns: Sequence[Column], data: np.ndarray) -> dict[str, np.ndarray]:
    """Views of columns in `data`, which begins with the first of them."""
    return {column.name: raw.view(column.dtype).reshape(column.shape) for column, raw in _split(columns, data)}


def wrong_columns(columns: Sequence[Column], data: np.ndarray) -> list[str]:
    """Names of the columns in `data`, which begins with the first of them, whose digest does not match."""
    return [column.name for column, raw in _split(columns, data) if _digest(raw) != column.digest]


def _split(columns: Sequence[Column], data: np.ndarray) -> Iterator[tuple[Column, np.ndarray]]:
    for column in columns:
        start = column.start - columns[0].start
        yield column, data[start : start + column.num_bytes]


def _digest(raw: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(raw.data)
