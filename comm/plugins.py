"""Python objects that a user names in a setting: `FILE.py:NAME` or `package.module:NAME`."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import SettingError

_files: dict[Path, ModuleType] = {}
_lock = threading.RLock()  # a file may load another one


def load_object(setting: str, path: str) -> Any:
    """The object; raises `SettingError` that names the setting if there is none.

    A file is executed once per process. It may import modules of its own folder. Its own errors are passed on.
    """
    home, _, name = path.rpartition(":")
    try:
        module = _module_of(Path(home)) if home.endswith(".py") else import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        raise SettingError(f"{setting}: no module {home}") from error
    if not hasattr(module, name):
        raise SettingError(f"{setting}: {home} has no {name}")
    return getattr(module, name)


@dataclass(frozen=True, slots=True)
class Builtin:
    """One of the project's own engines, by its word."""

    word: str


@dataclass(frozen=True, slots=True)
class AdapterClass:
    """A user's adapter: the role's own loop opens it and calls its methods."""

    open: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ProcessFunction:
    """A user's function that is the whole process of a role."""

    run: Callable[..., Any]


def is_own(engine: str) -> bool:
    """Whether `rollout.engine` or `trainer.engine` names an object of the user's; loads nothing."""
    return ":" in engine


def resolve_engine(setting: str, engine: str) -> Builtin | AdapterClass | ProcessFunction:
    """What `rollout.engine` or `trainer.engine` names: a word, a class, or a function."""
    if not is_own(engine):
        return Builtin(engine)
    found = load_object(setting, engine)
    if not callable(found):
        raise SettingError(f"{setting}: {engine} is neither a class nor a function")
    return AdapterClass(found) if isinstance(found, type) else ProcessFunction(found)


def adapter_class(setting: str, engine: str, own: Mapping[str, str], package: str | None) -> Callable[..., Any]:
    """The adapter that an engine's setting names; `own` maps each of the project's words to `.module:CLASS` in `package`.

    A module is imported when it is chosen, so that an emulated engine loads no library of models.
    """
    engine_found = resolve_engine(setting, engine)
    if isinstance(engine_found, Builtin):
        module, _, name = own[engine_found.word].partition(":")
        return getattr(import_module(module, package), name)
    assert isinstance(engine_found, AdapterClass), f"{setting}: a function is a process of its own"
    return engine_found.open


def _module_of(file: Path) -> ModuleType:
    if not file.is_file():
        raise ModuleNotFoundError(str(file), name=str(file))
    file = file.resolve()
    with _lock:
        if file not in _files:
            _files[file] = _execute(file, f"plugin_{len(_files)}_{file.stem}")  # files of one stem are two modules
        return _files[file]


def _execute(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if (beside := str(file.parent)) not in sys.path:
        sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
