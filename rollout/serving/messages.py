"""The messages and tools of a chat request, checked and in the form that chat templates read."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .fields import Fields, RequestRefused, shown

Message = dict[str, Any]
Tool = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
_ABSENT_IN_MESSAGES: dict[str, Sequence[Any]] = {
    "refusal": (), "audio": (), "function_call": (), "annotations": ([],), "reasoning_content": (), "reasoning": (),
    "tool_calls": ([],),
}  # fmt: skip
"""What a client sends back of an answer without an effect on the next one."""


def read_messages(given: Sequence[Any] | None) -> list[Message]:
    """The messages for the template: text is joined, the arguments of calls are objects, a developer is the system.

    Raises `RequestRefused`, which names the message.
    """
    if not given:
        raise RequestRefused("is missing" if given is None else "has no message", "messages")
    return [_read_message(each, f"messages[{index}]") for index, each in enumerate(given)]


def read_tools(given: Sequence[Any]) -> list[Tool]:
    """The tools for the template. Raises `RequestRefused`, which names the tool."""
    return [_read_tool(each, f"tools[{index}]") for index, each in enumerate(given)]


def _read_message(given: Any, where: str) -> Message:
    fields = Fields(_object(given, where), f"{where}.")
    role = fields.take("role", str)
    if role not in ROLES:
        problem = "is missing" if role is None else f"{shown(role)} is not a role"
        raise fields.refusal("role", f"{problem}; there are {', '.join(ROLES)}")
    calls = fields.any("tool_calls") if role == "assistant" else None
    message: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(fields, may_lack=bool(calls)),
    }
    if calls:
        if not isinstance(calls, list):
            raise fields.refusal("tool_calls", "must be a list")
        message["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id") if role == "tool" else ("name",):
        if (value := fields.take(name, str)) is not None:
            message[name] = value
    fields.neutral(_ABSENT_IN_MESSAGES)
    fields.finish()
    return message


def _text(fields: Fields, *, may_lack: bool) -> str:
    content = fields.any("content")
    if content is None and may_lack:
        return ""
    if isinstance(content, list):
        parts = [Fields(_object(part, f"{fields.where}content"), f"{fields.where}content.") for part in content]
        return "\n".join(_part(part) for part in parts)
    if not isinstance(content, str):
        raise fields.refusal("content", "must be text, or a list of parts of the type text")
    return content


def _part(fields: Fields) -> str:
    kind = fields.take("type", str)
    if kind != "text":
        raise fields.refusal("type", f"{shown(kind)} is not supported: this server reads text alone")
    text = fields.take("text", str)
    if text is None:
        raise fields.refusal("text", "is missing")
    fields.finish()
    return text


def _read_call(given: Any, where: str) -> dict[str, Any]:
    fields = Fields(_object(given, where), f"{where}.")
    fields.neutral({"type": ("function",), "index": tuple(range(1 << 7))})
    number = fields.take("id", str)
    inner = Fields(_object(fields.any("function"), f"{where}.function"), f"{where}.function.")
    fields.finish()
    name = _name(inner)
    text = inner.take("arguments", str, "{}")
    inner.finish()
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise inner.refusal("arguments", "must be JSON in a text") from error
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_tool(given: Any, where: str) -> Tool:
    fields = Fields(_object(given, where), f"{where}.")
    kind = fields.take("type", str)
    if kind != "function":
        raise fields.refusal("type", f"must be function, not {shown(kind)}")
    function = _object(fields.any("function"), f"{where}.function")
    fields.finish()
    inner = Fields(function, f"{where}.function.")
    _name(inner)
    inner.take("description", str)
    inner.take("parameters", dict)
    inner.neutral({"strict": (False,)})
    inner.finish()
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "strict"}}


def _name(fields: Fields) -> str:
    name = fields.take("name", str)
    if name is None or not _NAME.fullmatch(name):
        problem = "is missing" if name is None else f"{shown(name)} is not one"
        raise fields.refusal("name", f"{problem}; a name has 1 to 64 letters, digits, _ or -")
    return name


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestRefused(f"must be an object, not {shown(value)}", where)
    return value
