"""Python objects that a user names in a setting: `FILE.py:NAME` or `package.module:NAME`."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import SettingError


def load_plugin(setting: str, path: str) -> Any:
    """The object; raises `SettingError` that names the setting if there is none.

    A file may import what lies beside it. What it raises itself is passed on.
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


def _module_of(file: Path) -> Any:
    if not file.is_file():
        raise ModuleNotFoundError(str(file), name=str(file))
    spec = importlib.util.spec_from_file_location(f"plugin_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    if (beside := str(file.resolve().parent)) not in sys.path:
        sys.path.append(beside)
    spec.loader.exec_module(module)
    return module
