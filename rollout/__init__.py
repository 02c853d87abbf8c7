"""The rollout role: turns prompts and a weight version into trajectories.

`Engine`, `SamplingParams` and `Completion` are the public API of the generator. They are imported on first use, so that
an emulated rollout loads no engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.sampling import SamplingParams
    from .engine.sequence import Completion

__all__ = ["Completion", "Engine", "SamplingParams"]

_HOMES = {"Completion": "sequence", "Engine": "engine", "SamplingParams": "sampling"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".engine.{_HOMES[name]}", __name__), name)
