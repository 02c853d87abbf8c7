"""Python objects that a user names in a setting: `FILE.py:NAME` or `package.module:NAME`."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import SettingError

_files: dict[Path, ModuleType] = {}
_lock = threading.RLock()  # a file may load another one


def load_object(setting: str, path: str) -> Any:
    """The object at `path`; raises `SettingError` if it does not exist or its file ends the program, and passes on the errors of
    the user's own code.

    A file is executed once per process. It may import modules of its own folder.
    """
    home, _, name = path.rpartition(":")
    try:
        module = _module_of(Path(home)) if home.endswith(".py") else import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        raise SettingError(f"{setting}: no module {home}") from error
    except SystemExit as error:  # it would end this process without a word
        raise SettingError(
            f"{setting}: {home} cannot be loaded: it calls sys.exit, which belongs below `if __name__ == '__main__':`"
        ) from error
    if not hasattr(module, name):
        raise SettingError(f"{setting}: {home} has no {name}")
    return getattr(module, name)


def source_file(home: str) -> Path:
    """The file behind the part of a path before its colon: that file, or the source of a module, of which only the packages are imported."""
    if not home.endswith(".py"):
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(home)
            if spec is not None and spec.origin is not None:
                return Path(spec.origin)
    return Path(home)


def process_function(setting: str, engine: str) -> Callable[..., Any] | None:
    """The user's function that is the whole process of a role; None if `engine` names a built-in engine or an adapter's class."""
    if ":" not in engine:
        return None
    found = load_object(setting, engine)
    if not callable(found):
        raise SettingError(f"{setting}: {engine} is neither a class nor a function")
    return None if isinstance(found, type) else found


def adapter_class(setting: str, engine: str, own: Mapping[str, str], package: str | None) -> Callable[..., Any]:
    """The adapter that an engine's setting names; `own` maps each built-in engine's name to `.module:CLASS` in `package`.

    A module is imported when it is chosen, so that an emulated engine loads no model library.
    """
    if ":" in engine:
        return load_object(setting, engine)
    module, _, name = own[engine].partition(":")
    return getattr(import_module(module, package), name)


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
