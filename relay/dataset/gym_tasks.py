"""Tasks of reasoning-gym, which are made when they are read: `reasoning-gym/NAME`, and `?KEY=VALUE&...` for settings of that kind."""

import zlib
from functools import lru_cache
from typing import Any

import yaml

from ...comm.errors import SettingError
from .rows import as_json

REASONING_GYM = "reasoning-gym/"
"""The beginning of the names of its tasks in `data.path`."""
_NUM_TASKS = 1 << 20


class ReasoningGymRows:
    """2**20 tasks of reasoning-gym, each made when it is read. Splits have different tasks; `task` tells the reward which one it is."""

    def __init__(self, path: str, split: str) -> None:
        """`path` is as in `data.path`. Raises `SettingError`."""
        name, _, query = path.removeprefix(REASONING_GYM).partition("?")
        # A task's seed is the sum of this and its index; those of two splits do not meet.
        self._made_by = {"name": name, "seed": zlib.crc32(split.encode()) % (1 << 11) * _NUM_TASKS, "size": _NUM_TASKS}
        if query:
            self._made_by["config"] = _settings(path, query)
        try:
            self._tasks = open_tasks(self._made_by)
        except ImportError:
            raise SettingError(
                f"data.path: {path} needs the package reasoning_gym: pip install reasoning-gym"
            ) from None
        except (ValueError, TypeError, AssertionError) as error:
            raise SettingError(f"data.path: {path}: {error}") from error
        # A lease reads its row several times, and some kinds take a second to make.
        self._read = lru_cache(64)(self._make)

    def __len__(self) -> int:
        return _NUM_TASKS

    def __getitem__(self, index: int, /) -> bytes:
        return self._read(index)

    def _make(self, index: int) -> bytes:
        made = self._tasks[index]
        task = {**self._made_by, "index": index}
        return as_json(
            {"prompt": made["question"], "answer": made["answer"], "metadata": made["metadata"], "task": task}
        )


def open_tasks(made_by: dict[str, Any]) -> Any:
    """The library's tasks of `name`, `seed`, `size` and, if the kind's own settings are not the defaults, `config`.

    Raises `ImportError`, and `ValueError`, `TypeError` or `AssertionError` for settings that the kind refuses.
    """
    from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]

    config = dict(made_by.get("config", {}))
    if "datasets" in config:  # those of `composite` are objects of the library
        from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]

        config["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **each}) for each in config["datasets"]]
    return create_dataset(made_by["name"], seed=made_by["seed"], size=made_by["size"], **config)


def _settings(path: str, query: str) -> dict[str, Any]:
    """The values behind `?`, each in YAML."""
    found: dict[str, Any] = {}
    for word in query.split("&"):
        key, equals, value = word.partition("=")
        if not (equals and key.isidentifier()) or key in ("seed", "size"):
            raise SettingError(f"data.path: {path}: {word!r} is not a setting of the task, KEY=VALUE")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SettingError(f"data.path: {path}: the value of {key} is not YAML") from error
    return found
