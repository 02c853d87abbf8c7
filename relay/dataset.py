"""Rows of a user's data as JSON objects, and the order in which groups take them.

Rows come from a JSONL file, a parquet file or a Hugging Face data set, each when its turn comes: no set is held in memory. JSONL
needs no extra package. For the other forms the `datasets` library reads, caches and memory-maps. Tasks of reasoning-gym are made.
"""

import json
import math
import os
import re
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from ..comm.errors import SettingError
from ..comm.messages.base import GroupId
from ..comm.recipe import DataSettings

MAX_ROW_BYTES = 2 << 20
"""Most bytes of one row as JSON: it travels in a message."""
CHECKED_ROWS = 1 << 16
"""Rows of a set that are checked before the run; a later row is checked when its turn comes."""
REASONING_GYM = "reasoning-gym/"
"""The beginning of the names of its tasks in `data.path`."""
_NUM_TASKS, _CHECKED_TASKS = 1 << 20, 256
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gz")
"""Endings of files; another dot is part of a name on the Hub, such as `NuminaMath-1.5`."""
_BYTE_ORDER_MARK, _BLANK = b"\xef\xbb\xbf", b" \t\r\n"
_NOT_FINITE = re.compile(rb"\b(NaN|Infinity)\b")


class DatasetRows(Protocol):
    """Rows by index, each the bytes of one JSON object."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...


class JsonLines:
    """A JSONL file, of which the places of its lines are in memory: 8 bytes a row. The file stays open and must not change."""

    def __init__(self, path: Path) -> None:
        self._starts = array("q")
        place = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    if line.strip(_BLANK if place else _BLANK + _BYTE_ORDER_MARK):
                        self._starts.append(place)
                    place += len(line)
            self._file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise SettingError(f"data.path: {path} does not exist") from None
        except OSError as error:
            raise SettingError(f"data.path: cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self._starts.append(place)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int, /) -> bytes:
        start, end = self._starts[index], self._starts[index + 1]
        return os.pread(self._file, end - start, start).removeprefix(_BYTE_ORDER_MARK).strip(_BLANK)


class TableRows:
    """A data set of the `datasets` library. A number that is not finite is null."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> bytes:
        return _as_json(self._table[index])


class ReasoningGymRows:
    """2**20 tasks of reasoning-gym, each made when it is read. Splits have different tasks; `task` tells the reward which one it is."""

    def __init__(self, name: str, split: str) -> None:
        try:
            from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise SettingError(
                f"data.path: {REASONING_GYM}{name} needs the package reasoning_gym: pip install 'headrace[reasoning-gym]'"
            ) from None
        # A task's seed is the sum of this and its index; those of two splits do not meet.
        self._made_by = {"name": name, "seed": zlib.crc32(split.encode()) % (1 << 11) * _NUM_TASKS}
        try:
            self._tasks = create_dataset(**self._made_by, size=_NUM_TASKS)
        except (ValueError, TypeError, AssertionError) as error:
            raise SettingError(f"data.path: {REASONING_GYM}{name}: {error}") from error

    def __len__(self) -> int:
        return _NUM_TASKS

    def __getitem__(self, index: int, /) -> bytes:
        made = self._tasks[index]
        task = {**self._made_by, "size": _NUM_TASKS, "index": index}
        return _as_json(
            {"prompt": made["question"], "answer": made["answer"], "metadata": made["metadata"], "task": task}
        )


class PromptRows:
    """The rows of a data set with their prompts in the column `prompt`, in the form that the settings ask for."""

    def __init__(self, rows: DatasetRows, settings: DataSettings) -> None:
        self._rows = rows
        self._settings = settings

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> bytes:
        """A row; without a usable prompt it is as it was read, but never with another column's prompt."""
        raw, settings = self._rows[index], self._settings
        try:
            row = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return raw
        if not isinstance(row, dict):
            return raw
        if settings.prompt_column != "prompt":
            row.pop("prompt", None)
        if (prompt := row.get(settings.prompt_column)) is not None:
            row["prompt"] = _as_chat(prompt, settings.system_prompt) if settings.is_chat else prompt
        return msgspec.json.encode(row)


class PromptPool:
    """Deals out rows by a cursor: the position in the data is one integer.

    The order of an epoch is a permutation drawn from (seed, epoch), so cursor and seed alone determine what comes next.
    """

    def __init__(self, rows: DatasetRows, *, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.arange(len(rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def group_at(self, cursor: int) -> GroupId:
        """The group that the `cursor`-th first lease starts."""
        epoch, index = divmod(cursor, len(self._rows))
        if self._shuffle and self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)))
        return GroupId(epoch, int(self._order[1][index]))

    def row(self, group: GroupId) -> msgspec.Raw:
        """The row of a group, as JSON."""
        return msgspec.Raw(self._rows[group.prompt])


class MixedPrompts:
    """Several pools in given shares. Each has its own epochs; its rows are numbered after those of the pools before it.

    A round is as many prompts as there are rows. It gives each pool its share, rounded, in an order drawn from (seed, round), so
    cursor and seed alone determine what comes next.
    """

    def __init__(self, pools: Sequence[PromptPool], weights: Sequence[float], seed: int) -> None:
        self._pools = pools
        self._starts = np.cumsum([0, *map(len, pools)])
        self._seed = seed
        exact = np.cumsum(np.array(weights, float) / sum(weights)) * len(self)
        self._shares = np.diff(np.rint(exact).astype(int), prepend=0)
        self._order: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def group_at(self, cursor: int) -> GroupId:
        """The group that the `cursor`-th first lease starts."""
        number, place = divmod(cursor, len(self))
        if self._order[0] != number:
            self._order = (number, *self._round(number))
        source = int(self._order[1][place])
        group = self._pools[source].group_at(number * int(self._shares[source]) + int(self._order[2][place]))
        return GroupId(group.epoch, int(self._starts[source]) + group.prompt)

    def row(self, group: GroupId) -> msgspec.Raw:
        """The row of a group, as JSON."""
        source = int(np.searchsorted(self._starts, group.prompt, side="right")) - 1
        return self._pools[source].row(GroupId(group.epoch, group.prompt - int(self._starts[source])))

    def _round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The pool of each place in a round, and which of that pool's turns in the round it is."""
        sources = np.repeat(np.arange(len(self._pools)), self._shares)
        sources = np.random.default_rng([self._seed, number, len(self._pools)]).permutation(sources)
        turns = np.empty(len(sources), int)
        for source, share in enumerate(self._shares):
            turns[sources == source] = np.arange(share)
        return sources, turns


def open_prompts(settings: DataSettings, seed: int) -> PromptPool | MixedPrompts:
    """The prompts that `data.*` describes, in the order of a run. Raises `SettingError`."""
    each = [open_rows(msgspec.structs.replace(settings, path=path)) for path in settings.paths]
    pools = [PromptPool(rows, shuffle=settings.shuffle, seed=seed) for rows in each]
    return pools[0] if len(pools) == 1 else MixedPrompts(pools, settings.weights or [len(rows) for rows in each], seed)


def open_rows(settings: DataSettings) -> DatasetRows:
    """The rows of one file or data set, as `data.*` describes them. Raises `SettingError` if they cannot be read or are empty."""
    (name,) = settings.paths
    path = Path(name)
    if name.startswith(REASONING_GYM):
        return _in_form(ReasoningGymRows(name.removeprefix(REASONING_GYM), settings.split), settings)
    is_table = path.suffix == ".parquet" or path.is_dir()
    is_hub_id = not path.exists() and path.suffix not in _FILES and not path.is_absolute() and name.count("/") <= 1
    rows: DatasetRows = TableRows(_load_table(settings, name)) if is_table or is_hub_id else JsonLines(path)
    if not len(rows):
        raise SettingError(f"data.path: {name} has no rows")
    return _in_form(rows, settings)


def checked_prompts(
    rows: DatasetRows, path: str, column: str = "prompt", most: int | None = None
) -> Iterator[str | list[Any]]:
    """The prompt of each of the first rows, at most `most` and `CHECKED_ROWS`: text, or a list of chat messages.

    Raises `SettingError` at the first row without one.
    """
    limit = _CHECKED_TASKS if path.startswith(REASONING_GYM) else CHECKED_ROWS
    for index in range(min(len(rows), most or limit, limit)):
        if problem := row_problem(rows[index], column):
            raise SettingError(f"data.path: {path}:{index + 1} {problem}")
        yield msgspec.json.decode(rows[index])["prompt"]


def row_problem(raw: bytes, column: str = "prompt") -> str:
    """Why a row cannot be used, as the end of a sentence that begins with its name; empty if it can. `column` is in the sentence."""
    if len(raw) > MAX_ROW_BYTES:
        return f"has {len(raw)} bytes; at most {MAX_ROW_BYTES} fit"
    try:
        row = msgspec.json.decode(raw)  # as its readers will
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; JSON has no NaN and no Infinity: write null" if _NOT_FINITE.search(raw) else ""
        return f"is not JSON ({error}){hint}"
    if not isinstance(row, dict) or "prompt" not in row:
        has = f"it has {', '.join(row)}" if isinstance(row, dict) and row else "it is not an object with columns"
        return f"has no `{column}` column; {has}; see data.prompt_column"
    return (
        ""
        if isinstance(row["prompt"], str | list)
        else f"has a `{column}` that is neither text nor a list of chat messages"
    )


def _in_form(rows: DatasetRows, settings: DataSettings) -> DatasetRows:
    return PromptRows(rows, settings) if settings.prompt_column != "prompt" or settings.is_chat else rows


def _as_chat(prompt: Any, system_prompt: str) -> Any:
    """A text as a message of the user; the system prompt comes before messages that have none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (system_prompt and isinstance(messages, list)):
        return messages
    has_one = any(isinstance(message, dict) and message.get("role") == "system" for message in messages[:1])
    return messages if has_one else [{"role": "system", "content": system_prompt}, *messages]


def _as_json(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, default=str, allow_nan=False).encode()
    except ValueError:  # a table's missing numbers are NaN, which JSON lacks
        return json.dumps(_without_nan(row), default=str).encode()


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _without_nan(each) for key, each in value.items()}
        case list():
            return [_without_nan(each) for each in value]
        case _:
            return value


def _load_table(settings: DataSettings, name: str) -> Any:
    path = Path(name)
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise SettingError(
            f"data.path: {name} is not a .jsonl file; parquet files and Hugging Face data sets need the"
            " `datasets` package: pip install 'headrace[data]'"
        ) from None
    datasets.disable_progress_bars()
    try:
        if path.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files=str(path), split="train")
        if (path / "dataset_info.json").exists():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(name, settings.subset or None, split=settings.split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        # The library raises these for a wrong name, split or file.
        told = str(error.__cause__ or error) or type(error).__name__
        raise SettingError(f"data.path: cannot load {name}: {told.splitlines()[0]}") from error
