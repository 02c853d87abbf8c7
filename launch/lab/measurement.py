"""Figures beside those of a peer, and the file that keeps them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec


class Measurement(msgspec.Struct, frozen=True):
    """One figure: `value` in `unit`, and its `ratio` to `peer`. `runs` holds (value, ratio) of several runs; the figure is then
    their median."""

    name: str
    peer: str
    value: float
    unit: str
    ratio: float
    runs: tuple[tuple[float, float], ...] = ()
    holds: bool = True
    """False where the program broke a promise."""


def write_measurements(rows: Sequence[Measurement], path: Path) -> None:
    """Write them as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
