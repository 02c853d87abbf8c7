"""The settings of a run as trackers show them: by their names, without passwords."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ....comm.recipe import Recipe

HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
"""The user and password of an address."""
_WORDS = "key|secret|passw|credential|signature|^sig$|^auth"
_SECRET = re.compile(f"{_WORDS}|token$", re.IGNORECASE)
_IN_QUERY = re.compile(r"(?<=[?&#;])([^=&#;\s]+)=([^&#;\s]+)")
"""A name in an address and its value."""
_IN_ADDRESS = re.compile(f"{_WORDS}|token", re.IGNORECASE)
"""The names there whose values are secret."""


def shown_settings(recipe: Recipe) -> dict[str, Any]:
    """Each setting by its name, such as `run.steps`."""
    return _flat(msgspec.to_builtins(recipe))


def changed_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that differ from the defaults. Those of the folder and of the start are left out: each run has its own."""
    defaults = shown_settings(Recipe())
    own = ("run.dir", "run.resume", "run.report_to")
    return {
        name: value
        for name, value in shown_settings(recipe).items()
        if name not in own and (name not in defaults or value != defaults[name])
    }


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": HIDDEN if _is_secret(name, value) else _without_secrets(value)
        for section, settings in sections.items()
        for name, value in settings.items()
    }


def _is_secret(name: str, value: Any) -> bool:
    # A number that is called a key is a count, such as one of heads.
    return isinstance(value, str | list | tuple) and bool(value) and _SECRET.search(name) is not None


def _hide_in_query(found: re.Match[str]) -> str:
    name, value = found.groups()
    return f"{name}={HIDDEN if _IN_ADDRESS.search(name) else value}"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        return _IN_QUERY.sub(_hide_in_query, _USER.sub(HIDDEN, value))
    if isinstance(value, Mapping):
        return {name: HIDDEN if _is_secret(name, part) else _without_secrets(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(part) for part in value]
    return value
