"""The prompt pool: the data set's rows in the order in which their groups are leased."""

import json
from pathlib import Path

import msgspec
import numpy as np

from ..comm.errors import SettingError
from ..comm.messages import GroupId


class PromptPool:
    """Rows of a JSONL file, dealt out by a cursor: the position in the data is one integer.

    The order of an epoch is a permutation drawn from (seed, epoch), so that cursor and seed alone say what comes next.
    """

    def __init__(self, path: Path, *, shuffle: bool, seed: int) -> None:
        self._rows = [line for line in path.read_bytes().splitlines() if line.strip()]
        if not self._rows:
            raise SettingError(f"data.path: {path} has no rows")
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.arange(len(self._rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def group_at(self, cursor: int) -> GroupId:
        """The group that the `cursor`-th first lease starts."""
        epoch, index = divmod(cursor, len(self._rows))
        if self._shuffle and self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)))
        return GroupId(epoch, int(self._order[1][index]))

    def row(self, group: GroupId) -> msgspec.Raw:
        """The row of a group, as the JSON of its line."""
        return msgspec.Raw(self._rows[group.prompt])


def check_rows(path: Path) -> None:
    """Raise `SettingError` unless each line is a JSON object with a `prompt`: text, or a list of chat messages."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SettingError(f"data.path: {path}:{number} is not JSON ({error.msg})") from error
        if not isinstance(row, dict) or "prompt" not in row:
            has = f"it has {', '.join(row)}" if isinstance(row, dict) and row else "it is no object with columns"
            raise SettingError(f"data.path: {path}:{number} has no `prompt` column; {has}")
        if not isinstance(row["prompt"], str | list):
            raise SettingError(f"data.path: {path}:{number}: `prompt` must be text or a list of chat messages")
