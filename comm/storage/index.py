"""Where the columns of each row are stored in a storage unit: plain state, free of I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from .protocol import Block


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes of the arena that hold a block; they are freed when its last column is dropped or replaced."""

    offset: int
    num_bytes: int


class RowIndex:
    """Rows by key."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Block, Allocation]]] = {}
        """The blocks of each row, whose column names do not overlap."""

    def add(self, key: str, block: Block, allocation: Allocation) -> list[Allocation]:
        """Add a block's columns to a row in place of those with the same names; returns what is free now."""
        names = {column.name for column in block.columns}
        kept = [(block, allocation)]
        freed = []
        for held, held_allocation in self._rows.get(key, ()):
            if remaining := tuple(column for column in held.columns if column.name not in names):
                kept.append((msgspec.structs.replace(held, columns=remaining), held_allocation))
            else:
                freed.append(held_allocation)
        self._rows[key] = kept
        return freed

    def locate(self, key: str, columns: Iterable[str] | None) -> list[Block]:
        """The blocks of a row with only the named columns; raises `KeyError` with the row or column that is missing."""
        blocks = [block for block, _ in self._rows[key]]
        if columns is None:
            return blocks
        wanted = set(columns)
        if absent := wanted.difference(column.name for block in blocks for column in block.columns):
            raise KeyError(f"{key}: {', '.join(sorted(absent))}")
        chosen = [tuple(c for c in block.columns if c.name in wanted) for block in blocks]
        return [msgspec.structs.replace(b, columns=c) for b, c in zip(blocks, chosen, strict=True) if c]

    def drop(self, key: str) -> list[Allocation] | None:
        """Drop a row; returns what is free now, None if the row is not there."""
        row = self._rows.pop(key, None)
        return None if row is None else [allocation for _, allocation in row]

    def listing(self) -> list[str]:
        """The keys of all rows."""
        return list(self._rows)
