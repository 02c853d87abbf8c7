"""Reads a recipe: a YAML file, and `key=value` words with dotted keys that override it.

A mistake in either is a `SettingError` that names the setting. The setting's type decides the meaning of a scalar: `1e-6`
is a number, `0012` may be a name, and `on` is true only for a boolean setting. The resolved recipe is saved as
`config.yaml` in the run folder, where each process reads it.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect as kinds

from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from .peer_names import name_hint
from .run_checkpoints import from_checkpoint
from .run_folder import CONFIG_FILE, make_run_folder
from .values import SettingsLoader, describe, members_of, show_value, typed_value

LAB = "lab"
"""The section whose values stay as they are written, for `launch/lab`."""
_ERROR = re.compile(r"(.*) - at `\$\.(\w+\.\w+)(.*)`", re.DOTALL)
"""The text of msgspec's `ValidationError`: the reason, the setting, and the place within its value."""
_ITEM = re.compile(r"\[\d+\]")


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` (None: only defaults) with dotted `key=value` overrides; raises `SettingError`.

    A `model.path` that names a run is the folder of that run's policy in it.
    """
    layers = [(f"{path}: ", _load(Path(path)))] if path is not None else []
    return from_checkpoint(_merge([*layers, *(("", _parse(word)) for word in overrides)]))


def saved_values(path: Path, section: str) -> Mapping[str, Any]:
    """The values of a section of a saved recipe, unchecked; none if it cannot be read or does not have the section."""
    try:
        values = _load(path).get(section)
    except SettingError:
        return {}
    return values if isinstance(values, dict) else {}


def parse_recipe(text: str) -> Recipe:
    """The recipe of a saved one's text; raises `SettingError`."""
    return _merge([("", _sections(text, "the run's recipe"))])


def recipe_of(sections: Mapping[str, Any]) -> Recipe:
    """The recipe of settings by section, whose values have Python's types; raises `SettingError`."""
    return _merge([("", sections)])


def changed_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with dotted `key=value` overrides; raises `SettingError`."""
    return _merge([("", msgspec.to_builtins(recipe)), *(("", _parse(word)) for word in overrides)])


def _merge(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Recipe:
    """The recipe of several layers, each with the words before its errors; a later layer wins."""
    known = known_settings()
    merged: dict[str, dict[str, Any]] = {}
    for origin, layer in layers:
        refuse_unknown(layer, origin)
        for section, values in layer.items():
            merged.setdefault(section, {}).update(
                values
                if section == LAB
                else {key: typed_value(known[f"{section}.{key}"].type, value) for key, value in values.items()}
            )
    try:
        return msgspec.convert(merged, Recipe, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SettingError):  # of a section itself
            raise error.__cause__ from None
        raise SettingError(_explain(str(error), merged)) from error


def save_recipe(recipe: Recipe) -> Path:
    """Write the resolved recipe into its run folder; returns the path."""
    path = make_run_folder(recipe.run.dir) / CONFIG_FILE
    path.write_text(recipe_yaml(recipe), encoding="utf-8")
    return path


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `read_recipe` reads."""
    return yaml.safe_dump(msgspec.to_builtins(recipe), sort_keys=False, allow_unicode=True)


def sections() -> Iterator[tuple[str, type]]:
    """Name and struct of each section of the recipe but `LAB`."""
    return ((section.name, section.type) for section in msgspec.structs.fields(Recipe) if section.name != LAB)


@cache
def known_settings() -> Mapping[str, kinds.Field]:
    """All settings by dotted name, in the recipe's order."""
    info = {section: kinds.type_info(kind) for section, kind in sections()}
    return {f"{section}.{entry.name}": entry for section, kind in info.items() for entry in kind.fields}  # pyright: ignore


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingError(f"no recipe file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read the recipe {str(path)!r}: {error}") from error
    return _sections(text, f"the recipe {str(path)!r}")


def _sections(text: str, origin: str) -> Mapping[str, Any]:
    """The sections of a recipe's text, which is called `origin` in errors."""
    try:
        loaded = yaml.load(text, SettingsLoader)
    except yaml.YAMLError as error:
        raise SettingError(f"{origin} is not YAML: {_problem(error)}") from error
    if not isinstance(loaded or {}, dict):
        raise SettingError(f"{origin} must be a mapping of sections, such as `run:`")
    return loaded or {}


def _problem(error: yaml.YAMLError) -> str:
    """The mistake in a text and its place, without YAML's excerpt of several lines with a mark below."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return where + " ".join(str(getattr(error, "problem", None) or error).split())


def _parse(word: str) -> Mapping[str, Any]:
    """`a.b=c` as nested mappings."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise SettingError(f"{word!r} is not an override; write key=value, such as run.steps=200")
    value: Any = None if text == "null" else text
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def refuse_unknown(layer: Mapping[str, Any], origin: str = "") -> None:
    """Raise `SettingError`, which begins with `origin`, if a layer has an unknown name."""
    known = known_settings()
    firsts = {name.partition(".")[0]: name for name in reversed([*known])}
    for section, values in layer.items():
        if section == LAB:
            if not isinstance(values, dict):
                raise SettingError(f"{origin}'lab' is a section; headrace plan --help lists its settings")
            continue
        if section in firsts and not isinstance(values, dict):
            raise SettingError(f"{origin}{section!r} is a section; set one of its settings, such as {firsts[section]}")
        named = {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {}
        for name in named or ([] if section in firsts else [str(section)]):
            if name not in known:
                if hint := name_hint(whole := _whole_name(name, named.get(name, values))):
                    raise SettingError(f"{origin}unknown setting {whole!r}{hint}")
                raise SettingError(f"{origin}unknown setting {whole!r}{_nearest(whole)}")
            if isinstance(named[name], dict) and kinds.DictType not in map(type, members_of(known[name].type)):
                raise SettingError(f"{origin}{name} is one value and has no settings of its own")


def _whole_name(name: str, value: Any) -> str:
    """The name of the first value below `name`: other trainers have sections within sections."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def _nearest(name: str) -> str:
    known = known_settings()
    leaf = name.rpartition(".")[2]
    near = (
        [other for other in known if other.startswith(name)]
        or [other for other in known if other.endswith(f".{leaf}")]
        or difflib.get_close_matches(name, known, n=1)
    )
    return f"; the nearest is {near[0]!r}" if near else "; --help lists all settings"


def _explain(message: str, merged: Mapping[str, Mapping[str, Any]]) -> str:
    found = _ERROR.fullmatch(message)
    assert found is not None, message
    reason, name, inner = found.groups()
    is_wrong_word = reason.startswith("Invalid enum value") and _ITEM.fullmatch(inner)
    if inner and not is_wrong_word:
        return f"{name}{inner}: {reason[0].lower()}{reason[1:]}"
    section, _, key = name.partition(".")
    value = merged[section][key]
    kind = known_settings()[name].type
    return f"{name}={show_value(value)} is not allowed; it takes {describe(kind)}"
