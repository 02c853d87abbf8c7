"""The prompts of `eval.path`, file after file, and when an evaluation is due."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...comm.errors import SettingError
from ...comm.messages.base import GroupId
from ...comm.recipe import DataSettings, EvalSettings
from ..dataset.opening import open_rows
from ..dataset.rows import DatasetRows
from ..dataset.user_rows import is_python


class EvaluationPrompts:
    """The rows of each file by its name, of which `num_prompts` count, and how they are judged.

    An evaluation is due at version 0, every `every` versions, and after the last of `num_steps` steps. `num_shares` rollouts
    share its prompts.
    """

    def __init__(
        self, rows: Mapping[str, DatasetRows], settings: EvalSettings, num_steps: int, num_shares: int = 1
    ) -> None:
        limit = settings.max_prompts
        self.num_prompts = {name: min(len(each), limit or len(each)) for name, each in rows.items()}
        self.settings = settings
        self.num_shares = num_shares
        self._num_steps = num_steps
        self._rows = [(each, index) for name, each in rows.items() for index in range(self.num_prompts[name])]

    def due(self, version: int) -> int:
        """The newest version up to this one at which an evaluation is due; -1 before the first version."""
        return version if version in (-1, self._num_steps) else version - version % self.settings.every

    def place(self, group: GroupId) -> tuple[str, int]:
        """The name of a group's file, and the number of its row there."""
        index = group.prompt
        for name, num_prompts in self.num_prompts.items():
            if index < num_prompts:
                return name, index
            index -= num_prompts
        raise IndexError(group)

    def row(self, group: GroupId) -> bytes:
        """The row of a group, as JSON."""
        rows, index = self._rows[group.prompt]
        return rows[index]


def evaluation_names(settings: EvalSettings) -> dict[str, str]:
    """The path of each file by its name in the metrics: its stem, or what is behind `FILE.py:`. Raises `SettingError` if two have one name."""
    named: dict[str, str] = {}
    for path in settings.paths:
        name = path.partition(":")[2] if is_python(path) else Path(path).stem
        if name in named:
            raise SettingError(f"eval.path: {named[name]} and {path} would both be eval/{name}/...; rename one")
        named[name] = path
    return named


def evaluation_data(data: DataSettings, settings: EvalSettings) -> dict[str, DataSettings]:
    """The settings that read each file: those of `data`, with its path and `eval.split`."""
    named = evaluation_names(settings)
    return {
        name: msgspec.structs.replace(data, path=path, weights=(), split=settings.split) for name, path in named.items()
    }


def open_evaluation(
    data: DataSettings, settings: EvalSettings, num_steps: int, num_shares: int
) -> EvaluationPrompts | None:
    """The evaluation that the settings ask for, None without one. Raises `SettingError` for prompts that cannot be read."""
    rows = {name: open_rows(each) for name, each in evaluation_data(data, settings).items()}
    return EvaluationPrompts(rows, settings, num_steps, num_shares) if rows else None
