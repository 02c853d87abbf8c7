"""The forms in which a policy calls tools, and in which it reads their results.

<tool_call>{"name": "calc", "arguments": {"expression": "2+3"}}</tool_call>     for chat prompts (Hermes, Qwen)
<calc>2+3</calc>                                                                for text prompts: the first argument
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_ERROR = re.compile(r'\{"error": "')
"""The beginning of the result in JSON that the policy reads instead."""
_RESULTS = re.compile(r"<result>(.*?)</result>|<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


class ToolCall(NamedTuple):
    """One call of a turn; `problem` says what is wrong with it."""

    name: str
    arguments: dict[str, Any] | list[Any]
    problem: str = ""


def parse_calls(turn: str, names: Sequence[str] | None, *, is_chat: bool) -> list[ToolCall]:
    """The calls of a turn in their order. names: the tools of a text prompt; None takes any name."""
    if is_chat:
        return [_hermes_call(match.group(1).strip()) for match in _HERMES.finditer(turn)]
    if names is not None and not names:
        return []
    known = r"\w+" if names is None else "|".join(map(re.escape, names))
    form = re.compile(rf"<({known})>(.*?)(?:</\1>|$)", re.DOTALL)
    return [ToolCall(match.group(1), [match.group(2)]) for match in form.finditer(turn)]


def parse_results(text: str, num_calls: int) -> list[str | None]:
    """The results of a turn's calls in the text that follows it, which a chat template may have framed.

    The whole text is the result of a single call in another frame. None where it does not say which result belongs to a call.
    """
    found = [first or second for first, second in _RESULTS.findall(text)]
    if len(found) == num_calls:
        return [*found]
    return [text] if num_calls == 1 else [None] * num_calls


def is_error(result: str) -> bool:
    """Whether a result is an error, in whatever frame: the tool has raised it, or the call was not one."""
    return _ERROR.search(result) is not None


def _hermes_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        name = call["name"]
        arguments = call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToolCall("", {}, 'a tool call must be JSON with "name" and "arguments"')
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(str(name), {}, "the arguments of a tool call must be JSON")
    if not isinstance(arguments, dict):
        return ToolCall(str(name), {}, "the arguments of a tool call must be an object")
    return ToolCall(str(name), arguments)
