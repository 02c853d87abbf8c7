"""The functions and rows that a Python caller passes to a run, written as the files that a recipe names.

They are in the folder `inputs` of the run folder, so the run's recipe can be run again from the command line. A later call has a folder
of its own beside it, `inputs_2`: the run of the first one may use its files at any time, also when it continues.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import unwrap
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

from ...comm.errors import SettingError
from ...relay.dataset.opening import FILES
from ...relay.dataset.rows import as_json
from ...relay.dataset.user_rows import is_python
from ..config.run_checkpoints import TrainedModel
from ..config.run_folder import under_way
from .keywords import plain
from .source import SourceFile, importable

_INPUTS = "inputs"
"""Folder of the first call's files in the run folder."""
_ROWS = ("data.path", "eval.path")
_PATHS = (*_ROWS, "lora.path")
_FILES = {"data.path": "prompts.jsonl", "eval.path": "held_out.jsonl"}
"""Names of the files of rows; that of the evaluation is in the names of its metrics."""
_HUB_NAME = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]*")
_SHOWN = 60
_SCOPE_TITLE = "Functions of a Python caller, written by headrace.train with what they use."


class PythonInputs:
    """The files of one call that its caller's objects become. Nothing is written before `write`."""

    def __init__(self, run_dir: Path) -> None:
        names = (f"{_INPUTS}_{number}" if number > 1 else _INPUTS for number in count(1))
        self._folder = next(run_dir / name for name in names if not (run_dir / name).exists())
        self._sources: dict[int, SourceFile] = {}
        self._rows: dict[str, Any] = {}

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with the paths of files in place of objects. Raises `SettingError` for an object that no file can hold."""
        settings = {name: self._setting(name, value) for name, value in values.items()}
        for name, value in settings.items():
            _check_plain(name, value)
        return settings

    def write(self) -> Path:
        """Make the folder and write the files; returns the folder. Raises `SettingError`; then no folder is left."""
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:  # of a call that has begun at the same time
            raise SettingError(f"run.dir: {under_way(self._folder.parent)}") from None
        try:
            for number, source in enumerate(self._sources.values()):
                path = self._source_path(number)
                path.touch(0o600)  # it has values of the script, which its writer may not mean to show
                path.write_text(source.text(_SCOPE_TITLE), encoding="utf-8")
            for name, rows in self._rows.items():
                with (self._folder / _FILES[name]).open("w", encoding="utf-8") as file:
                    file.writelines(line + "\n" for line in _lines(name, rows))
        except BaseException:
            self.remove()
            raise
        return self._folder

    def remove(self) -> None:
        """Remove what `write` has written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _setting(self, name: str, value: Any) -> Any:
        if name == "model.path":
            return _model(value)
        if name in _ROWS and not isinstance(value, str | Path):
            return self._data(name, value)
        if isinstance(value, list | tuple):
            return [self._one(name, each) for each in value]
        return self._one(name, value)

    def _one(self, name: str, value: Any) -> Any:
        if callable(value):
            return self._function(name, value)
        return _absolute(value, is_path=name in _PATHS) if isinstance(value, str) else value

    def _data(self, name: str, value: Any) -> Any:
        """The file of rows, or the files that a list names."""
        if isinstance(value, list | tuple) and value and all(_is_source(each) for each in value):
            return [_absolute(str(each), is_path=True) for each in value]
        _refuse_missing(name, value)
        if isinstance(value, Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            is_split = isinstance(value, Mapping) and value and type(value) is not dict
            hint = f"; choose a split, such as [{next(iter(value))!r}]" if is_split else ""
            raise SettingError(
                f"{name}: rows are a path, a list of dicts or of texts, or a data set with a length, not an object of type"
                f" {type(value).__name__}{hint}"
            )
        self._rows[name] = value
        return str(self._folder / _FILES[name])

    def _function(self, setting: str, thing: Any) -> str:
        """`FILE.py:NAME` of a function or class: its own module's file, or one that is written from its source."""
        home = importable(thing)
        if home is not None and "." not in home.name and "." not in thing.__qualname__:
            file = getattr(sys.modules[thing.__module__], "__file__", None) or ""
            if file.endswith(".py"):
                return f"{Path(file).resolve()}:{thing.__name__}"
        original = unwrap(thing)
        scope = original.__globals__ if isinstance(original, FunctionType) else _scope_of(thing)
        source = self._sources.setdefault(id(scope), SourceFile(scope))
        number = [*self._sources].index(id(scope))
        return f"{self._source_path(number)}:{source.add(setting, thing)}"

    def _source_path(self, number: int) -> Path:
        return self._folder / f"functions{f'_{number + 1}' if number else ''}.py"


def _check_plain(setting: str, value: Any) -> None:
    """Raise `SettingError` for a value that a recipe cannot hold."""
    if isinstance(value, dict | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_plain(setting, each)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise SettingError(
            f"{setting}: an object of type {type(value).__name__} cannot be the value of a setting; give a number, a text, a list or a dict"
        )


def _scope_of(thing: Any) -> Mapping[str, Any]:
    """The global names around a class: those of its methods, or of its module."""
    found = (
        [each.__globals__ for each in vars(thing).values() if isinstance(each, FunctionType)]
        if isinstance(thing, type)
        else []
    )
    module = sys.modules.get(getattr(thing, "__module__", "") or "")
    return found[0] if found else vars(module) if module else {}


def _model(value: Any) -> Any:
    """The folder of a model, of a run or of a checkpoint as text. A name on the Hub stays as it is."""
    if not isinstance(value, str | Path):
        raise SettingError(
            f"model.path: a model is the path of its folder or its name on the Hub, not an object of type {type(value).__name__};"
            " save it with its tokenizer (save_pretrained) and give the folder"
        )
    is_here = Path(value).exists()
    return str(Path(TrainedModel.find(str(value), "model.path: ").path).resolve()) if is_here else str(value)


def _is_source(value: Any) -> bool:
    """Whether an entry of a list is a file of rows rather than the text of a prompt."""
    return isinstance(value, Path) or (isinstance(value, str) and (os.path.exists(value) or is_python(value)))


def _refuse_missing(setting: str, entries: Any) -> None:
    """Refuse a list of files, of which one does not exist, or of names on the Hub: their names would become prompts."""
    texts = [each for each in entries if isinstance(each, str | Path)] if isinstance(entries, list | tuple) else []
    names = [each for each in texts if isinstance(each, Path) or each.endswith(FILES) or _HUB_NAME.fullmatch(each)]
    has_file = any(isinstance(each, Path) or os.path.isfile(each) for each in names)
    if not has_file and (not names or len(names) < len(entries)):
        return
    missing = str(next(each for each in entries if not _is_source(each)))
    shown = missing if len(missing) <= _SHOWN else f"{missing[:_SHOWN]}..."
    raise SettingError(
        f"{setting}: {shown!r} does not exist, in a list of files; a name on the Hub is pathlib.Path(...) there, and a prompt"
        ' is {"prompt": ...}'
    )


def _absolute(value: str, *, is_path: bool) -> str:
    """`FILE.py:NAME`, or the path of a file or folder, with an absolute path; what does not exist stays as it is."""
    file, colon, name = value.partition(":")
    if colon and file.endswith(".py") and os.path.isfile(file):
        return f"{Path(file).resolve()}:{name}"
    return str(Path(value).resolve()) if is_path and value and os.path.exists(value) else value


def _lines(setting: str, rows: Sequence[Any]) -> Iterator[str]:
    """Each row as a line of JSON. Raises `SettingError` for one that is neither a dict nor a text."""
    for index in range(len(rows)):
        try:
            row = rows[index]
        except (KeyError, IndexError, TypeError) as error:  # a table, of which an index is a column
            raise SettingError(
                f"{setting}: row {index + 1} cannot be read ({type(error).__name__}); give a list of dicts, such as that of"
                " pandas' to_dict('records')"
            ) from error
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise SettingError(
                f"{setting}: row {index + 1} is a {type(row).__name__}, neither a dict of columns nor a text"
            )
        try:
            yield as_json({str(key): _listed(value) for key, value in row.items()}).decode()
        except SettingError as error:
            raise SettingError(str(error).replace("data.path", setting)) from error


def _listed(value: Any) -> Any:
    """A value of a row with Python's numbers in place of numpy's and torch's."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else plain(value)
