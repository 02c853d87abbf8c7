"""The policy's text as an action, and an observation as text."""

from typing import Any

import pytest

from headrace.rollout.environments.actions import ActionForm, WrongAction, observation_text

pytest.importorskip("jsonschema")

pytestmark = pytest.mark.extra
METADATA = {"type": "object", "additionalProperties": True, "default": {}}


def form(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> ActionForm:
    """The form of an action as a pydantic model would describe it."""
    schema = {"type": "object", "additionalProperties": False, "properties": {"metadata": METADATA, **properties}}
    return ActionForm(schema | {"required": required or []} | more)


@pytest.mark.parametrize(
    ("properties", "required", "text", "action"),
    [
        ({"message": {"type": "string"}}, ["message"], ' {"a": 1} \n', {"message": '{"a": 1}'}),
        ({"message": {"type": "string"}}, [], "hi", {"message": "hi"}),
        ({"guess": {"type": "integer"}}, ["guess"], " 7 ", {"guess": 7}),
        ({"code": {"type": "string"}, "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]}}, ["code"], "x", {"code": "x"}),
        ({"move": {"$ref": "#/$defs/Move"}}, ["move"], "up", {"move": "up"}),
        ({"move": {"enum": ["up", "down"]}}, ["move"], "up", {"move": "up"}),
        (
            {"type": {"const": "call"}, "name": {"type": "string"}, "arguments": {"type": "object"}},
            ["name"],
            'I try {"name": "a"} and then {"name": "b", "arguments": {"c": {}}}. {',
            {"type": "call", "name": "b", "arguments": {"c": {}}},
        ),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, ["x", "y"], '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        ({"tokens": {"type": "array"}}, ["tokens"], '{"tokens": [1]}', {"tokens": [1]}),
    ],
)  # fmt: skip
def test_a_turn_becomes_an_action(properties: dict[str, Any], required: list[str], text: str, action: dict[str, Any]):
    moves = {"Move": {"enum": ["up", "down"], "type": "string"}}
    assert form(properties, required, **{"$defs": moves}).action(text) == action


@pytest.mark.parametrize(
    ("properties", "text", "problem"),
    [
        ({"guess": {"type": "integer"}}, "seven", "guess: 'seven' is not of type 'integer'"),
        ({"move": {"enum": ["up", "down"]}}, "left", "move: 'left' is not one of ['up', 'down']"),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, "1 2", "an action must be a JSON object"),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, '{"x": 1}', "'y' is a required property"),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, '{"x": 1, "y": 2, "z": 3}', "Additional properties"),
        ({"x": {"type": "integer"}, "y": {"type": "integer"}}, '{"x": ' * 9000, "an action must be a JSON object"),
    ],
)
def test_the_policy_reads_what_is_wrong_with_its_action(properties: dict[str, Any], text: str, problem: str):
    with pytest.raises(WrongAction, match="^" + problem.replace("[", r"\[")):
        form(properties, list(properties)).action(text)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string"}, "no named fields"),
        ({"type": "object", "properties": {"metadata": METADATA}}, "no field"),
        ({"type": "object", "properties": {"x": {"type": "integer", "minimum": "a"}}}, "invalid"),
    ],
)
def test_a_schema_that_no_text_fits_is_refused(schema: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        ActionForm(schema)


def test_an_observation_is_its_only_text_or_a_json_object():
    assert observation_text({"text": "hé", "metadata": {"a": 1}}) == "hé"
    assert observation_text({"text": "hé", "left": 2}) == '{"text": "hé", "left": 2}'
    assert observation_text({"text": ""}) == '{"text": ""}'
    assert observation_text({"board": [0, 1]}) == '{"board": [0, 1]}'
