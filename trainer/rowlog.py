"""What each step trained on, kept in the run folder: `rows/step_N.safetensors` with the rows' columns and the hand-outs.

A hand-out is kept as it came, since it decides what is packed together: so a replay adds up the same numbers in the same
order. With several actor ranks each keeps the rows that it fetched.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ..comm.errors import SettingError
from ..comm.messages import HandOut, decode, encode


class RowLog:
    """Collects the rows and hand-outs of a step, and writes them when it is over."""

    def __init__(self, run_dir: Path, rank: int = 0) -> None:
        self._folder = run_dir / "rows"
        self._suffix = f".{rank}" if rank else ""
        self._columns: dict[str, np.ndarray] = {}
        self._hand_outs: list[HandOut] = []

    def add_row(self, key: str, columns: dict[str, np.ndarray]) -> None:
        """A row that this rank fetched."""
        self._columns |= {f"{key}/{name}": column for name, column in columns.items()}

    def add_hand_out(self, hand_out: HandOut) -> None:
        """A hand-out, in the order in which they came."""
        self._hand_outs.append(hand_out)

    def write(self, step: int) -> None:
        """Write the step's file, whole or not at all, and begin the next."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step}{self._suffix}.safetensors"
        new = path.with_suffix(".new")
        metadata = {str(n): encode(hand_out).decode() for n, hand_out in enumerate(self._hand_outs)}
        save_file(self._columns, new, metadata)
        new.replace(path)
        self._columns, self._hand_outs = {}, []


class SavedStep:
    """A step's file as a replay reads it."""

    def __init__(self, run_dir: Path, step: int) -> None:
        path = run_dir / "rows" / f"step_{step}.safetensors"
        if not path.exists():
            raise SettingError(f"run.dir: {path} is not there; a run can be replayed if it ran with run.save_rows=true")
        with safe_open(path, framework="numpy") as file:
            self._columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            self._metadata: dict[str, str] = file.metadata() or {}

    def hand_outs(self) -> Iterator[HandOut]:
        """The hand-outs in their order."""
        for number in range(len(self._metadata)):
            message = decode(self._metadata[str(number)].encode())
            assert isinstance(message, HandOut)
            yield message

    def fetch(self, key: str) -> dict[str, np.ndarray]:
        """The columns of a row, wherever it lay."""
        prefix = f"{key}/"
        return {name.removeprefix(prefix): c for name, c in self._columns.items() if name.startswith(prefix)}
