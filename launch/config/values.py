"""The values of settings as text: how a user writes one, what its type allows, and what a scalar of YAML means for it."""

import math
from contextlib import suppress
from typing import Any

import msgspec
import yaml
from msgspec import inspect as kinds

from ...comm.recipe.fields import FINITE

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NAMES = {kinds.BoolType: "true or false", kinds.NoneType: "null", kinds.StrType: "str"}


class SettingsLoader(yaml.SafeLoader):
    """Reads every scalar but null as text; YAML 1.1 reads `on` as true and `1e-6` as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML reads it from the class
        first: [(tag, pattern) for tag, pattern in pairs if tag.endswith(":null")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping, if no key is there twice: YAML keeps the last one, and the settings under the others would be lost."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        keys = [key for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:number]]:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} is there twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def describe(kind: kinds.Type) -> str:
    """The allowed values of a setting: its type with bounds, or its choices."""
    match kind:
        case kinds.UnionType(types=members):
            return " or ".join(map(describe, members))
        case kinds.LiteralType(values=words) | kinds.Metadata(extra_json_schema={"examples": words}):
            return f"one of {', '.join(map(str, words))}"
        case kinds.IntType() | kinds.FloatType():
            limits = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
            bounds = [
                f"{sign} {limit if isinstance(limit, int) else f'{limit:g}'}"
                for sign, limit in limits
                if limit is not None and abs(limit) != FINITE
            ]
            name = "int" if isinstance(kind, kinds.IntType) else "finite float" if kind.le == FINITE else "float"
            return f"{name} {' and '.join(bounds)}".strip()
        case kinds.VarTupleType(item_type=item):
            return f"list of {describe(item)}"
        case kinds.DictType():
            return "{name: value}"
        case kinds.StructType(fields=entries):
            return f"{{{', '.join(entry.name for entry in entries)}}}"
    return _NAMES[type(kind)]


def show_value(value: Any) -> str:
    """A setting's value as a user writes it."""
    return str(value) if isinstance(value, str | float) else msgspec.json.encode(value).decode()


def typed_value(kind: kinds.Type, value: Any) -> Any:
    """A scalar's text as a value of the setting's type; a text that does not fit stays text, and `convert` refuses it."""
    for member in members_of(kind):
        with suppress(ValueError, yaml.YAMLError):
            match member, value:
                case kinds.BoolType(), str():
                    return _TRUTH.get(value.lower(), value)
                case kinds.IntType(), str():
                    return int(value)
                case kinds.FloatType(), str():
                    number = float(value.replace(".inf", "inf"))
                    return ".nan" if math.isnan(number) else number  # `convert` would take any other spelling
                case kinds.DictType(), str() | dict():
                    entries = yaml.load(value, SettingsLoader) if isinstance(value, str) else value
                    if isinstance(entries, dict):
                        return {
                            key: yaml.safe_load(each) if isinstance(each, str) else each
                            for key, each in entries.items()
                        }
                case kinds.VarTupleType(item_type=kinds.StrType() | kinds.LiteralType()), str() if (
                    member is kind and value[:1] != "["
                ):
                    return [value]
                case kinds.VarTupleType(), str() if member is kind or value.startswith("["):
                    return yaml.load(value, SettingsLoader)
    return value


def members_of(kind: kinds.Type) -> tuple[kinds.Type, ...]:
    """The types that a setting takes; more than one for a union."""
    return kind.types if isinstance(kind, kinds.UnionType) else (kind,)
