"""Asynchronous reinforcement learning for language models. This package joins the five folders of the repository.

`trainer`, `rollout`, `relay`, `comm` and `launch` are links to them, and real folders in an installed package.
Invariant: `import headrace` loads nothing else, so a command line that prints help starts at once.
Start reading at `launch/command.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comm.errors import SettingError
    from .launch.python.api import Run, RunFailed, train

__version__ = "0.1.0"
__all__ = ["Run", "RunFailed", "SettingError", "__version__", "train"]

_HOMES: dict[str, str] = {
    "Run": "headrace.launch.python.api",
    "RunFailed": "headrace.launch.python.api",
    "SettingError": "headrace.comm.errors",
    "train": "headrace.launch.python.api",
}
"""Each public name that is loaded when it is first used, with its module."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
