"""What the policy writes, as an action with a JSON schema, and an observation of such an environment, as what the policy reads."""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

_SCALARS = {"string", "integer", "number", "boolean", "null"}


class WrongAction(ValueError):
    """A turn is not an action; the message is for the policy."""


class ActionForm:
    """The form of an environment's actions.

    If one field is required, or there is only one, and no field is a list or an object, the whole text of the turn is that field.
    Otherwise the action is the last JSON object in the text. `metadata` is not a field, and constants need not be given.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a schema that no action can be made for. Needs the package jsonschema."""
        properties: dict[str, Any] = schema.get("properties", {})
        if not properties:
            raise ValueError("its action has no named fields")
        jsonschema: Any = import_module("jsonschema")
        self._best_match = jsonschema.exceptions.best_match
        checker = jsonschema.validators.validator_for(schema)
        try:
            checker.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"its action's schema is invalid: {error.message}") from error
        self._validator = checker(schema)
        self._constants = {name: form["const"] for name, form in properties.items() if "const" in form}
        kinds = {
            name: set(_kinds(form, schema))
            for name, form in properties.items()
            if name != "metadata" and "const" not in form
        }
        if not kinds:
            raise ValueError("its action has no field that the policy could fill")
        required = [name for name in kinds if name in schema.get("required", ())] or list(kinds)
        is_plain = len(required) == 1 and all(found <= _SCALARS for found in kinds.values())
        self.field = required[0] if is_plain else None
        """The field that is the text of the turn; None if the action is a JSON object."""
        self._is_text = is_plain and "string" in kinds[required[0]]

    def action(self, text: str) -> dict[str, Any]:
        """The action of a turn. Raises `WrongAction`."""
        action = {**self._constants, **self._given(text)}
        if (error := self._best_match(self._validator.iter_errors(action))) is not None:
            where = "".join(f"{part}: " for part in error.absolute_path)
            raise WrongAction(f"{where}{error.message}")
        return action

    def _given(self, text: str) -> dict[str, Any]:
        if self.field is None:
            if (found := _last_object(text)) is None:
                raise WrongAction("an action must be a JSON object")
            return found
        text = text.strip()
        if self._is_text:
            return {self.field: text}
        try:
            return {self.field: json.loads(text)}
        except (ValueError, RecursionError):
            return {self.field: text}


def _kinds(form: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    """The JSON types that a field may have; "any" if its form does not say."""
    if (name := form.get("$ref")) is not None:
        form = schema.get("$defs", {}).get(str(name).rpartition("/")[2], {})
    choices = form.get("anyOf") or form.get("oneOf")
    if choices:
        for choice in choices:
            yield from _kinds(choice, schema)
    elif "enum" in form and "type" not in form:
        yield from {_kind_of(value) for value in form["enum"]}
    else:
        kind = form.get("type", "any")
        yield from [kind] if isinstance(kind, str) else kind


def _kind_of(value: Any) -> str:
    return "string" if isinstance(value, str) else "any" if isinstance(value, dict | list) else "number"


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text that is not within another one."""
    decoder = json.JSONDecoder()
    found = None
    place = text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found


def observation_text(observation: Mapping[str, Any]) -> str:
    """An observation as text: its only field if that is text, otherwise its fields as a JSON object, without `metadata`."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str) and values[0]:
        return values[0]
    return json.dumps(fields, ensure_ascii=False)
