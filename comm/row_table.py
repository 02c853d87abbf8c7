"""Which columns of which rows lie where in a storage unit: plain state, free of I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from .row_messages import Block


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the arena that a block was given; they are free again when its last column is gone or replaced."""

    place: int
    num_bytes: int


class RowTable:
    """Rows by key, each a list of blocks whose column names do not overlap."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Block, Span]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: str, block: Block, span: Span) -> list[Span]:
        """Add a block's columns to a row in place of those with the same names; returns what is free now."""
        names = {column.name for column in block.columns}
        kept, freed = [(block, span)], []
        for held, held_span in self._rows.get(key, ()):
            remaining = tuple(column for column in held.columns if column.name not in names)
            if remaining:
                kept.append((msgspec.structs.replace(held, columns=remaining), held_span))
            else:
                freed.append(held_span)
        self._rows[key] = kept
        return freed

    def locate(self, key: str, columns: Iterable[str] | None) -> list[Block]:
        """The blocks of a row, with the columns named only. Raises `KeyError` with the row and column that is not there."""
        if key not in self._rows:
            raise KeyError(key)
        blocks = [block for block, _ in self._rows[key]]
        if columns is None:
            return blocks
        wanted = set(columns)
        held = {column.name for block in blocks for column in block.columns}
        if not wanted <= held:
            raise KeyError(f"{key}: {', '.join(sorted(wanted - held))}")
        chosen = [tuple(c for c in block.columns if c.name in wanted) for block in blocks]
        return [msgspec.structs.replace(b, columns=c) for b, c in zip(blocks, chosen, strict=True) if c]

    def drop(self, key: str) -> list[Span] | None:
        """Forget a row; returns what is free now, None if there is no such row."""
        held = self._rows.pop(key, None)
        return None if held is None else [span for _, span in held]

    def listing(self) -> dict[str, list[str]]:
        """Row keys and the names of their columns."""
        return {
            key: [column.name for block, _ in blocks for column in block.columns] for key, blocks in self._rows.items()
        }
