"""Chat messages to token ids, with the template that training applies, and without tokenizing a turn of the model again.

A client sends back the whole conversation as text. If it begins with one that was answered here, the tokens of that one are kept as
they were drawn, and only what the template puts behind them is tokenized, as in an environment of several turns
(`engine/chat_template.py`).
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...comm.errors import SettingError, UnusablePrompt
from ...comm.recipe import DataSettings
from ..engine.chat_template import prompt_tokens, tokens_behind_turn
from .fields import RequestRefused
from .messages import Message, Tool

MOST_TOKENS = 1 << 22
"""Tokens of all conversations that are remembered; the oldest are forgotten first."""
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that waits for its next turn."""

    token_ids: list[int]
    messages: Sequence[Message]
    num_first: int
    """The number of messages that were tokenized together, before the first turn whose tokens were kept."""
    key: bytes
    """A digest of the tools and the arguments of the template."""


@dataclass(frozen=True, slots=True)
class _Answered:
    token_ids: "array[int]"
    num_first: int


class Conversations:
    """The conversations of a server. Used by one thread."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        """tokenizer: one that no other thread uses. settings: with the chat template."""
        self._tokenizer = tokenizer
        self._settings = settings
        self._answered: OrderedDict[bytes, _Answered] = OrderedDict()
        self._num_tokens = 0
        self._shows_tools: bool | None = None

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], template_values: Mapping[str, Any]
    ) -> ChatPrompt:
        """The tokens of a conversation and of the head of the next turn. Raises `RequestRefused`."""
        values = {**(self._settings.chat_template_kwargs or {}), **template_values}
        settings = replace(self._settings, chat_template_kwargs=values)
        shown = list(tools) or None
        key = _digest(b"", [shown, values])
        try:
            if shown and not self._can_show_tools(settings):
                raise RequestRefused("the chat template of this model does not show tools to it", "tools")
            kept = self._continued(messages, shown, settings, key)
            if kept is not None:
                return kept
            tokens = prompt_tokens({"prompt": list(messages)}, self._tokenizer, settings, shown)
        except UnusablePrompt as error:
            raise RequestRefused(str(error).partition(": ")[2], "messages") from error
        except SettingError as error:
            problem = (
                "this model has no chat template; start the server with data.chat_template=FILE, or use /v1/completions"
            )
            raise RequestRefused(problem, "messages") from error
        return ChatPrompt(tokens, messages, len(messages), key)

    def remember(self, prompt: ChatPrompt, answer: Message, token_ids: Sequence[int]) -> None:
        """Keep the tokens of a turn, so that a conversation which goes on with this answer keeps them."""
        digest = _conversation(prompt.key, [*prompt.messages, answer])
        self._forget(digest)
        self._answered[digest] = _Answered(array("q", [*prompt.token_ids, *token_ids]), prompt.num_first)
        self._num_tokens += len(prompt.token_ids) + len(token_ids)
        while self._num_tokens > MOST_TOKENS:
            self._forget(next(iter(self._answered)))

    def _forget(self, digest: bytes) -> None:
        if (gone := self._answered.pop(digest, None)) is not None:
            self._num_tokens -= len(gone.token_ids)

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, settings: DataSettings, key: bytes
    ) -> ChatPrompt | None:
        """The prompt after the last turn, if that was drawn here and the template leaves what came before as it was."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        if last < 1 or last == len(messages) - 1:
            return None
        digest = _conversation(key, messages[: last + 1])
        before = self._answered.get(digest)
        if before is None:
            return None
        self._answered.move_to_end(digest)
        first = before.num_first
        parts = messages[:first], messages[first:last], messages[last + 1 :]
        try:
            behind = tokens_behind_turn(*parts, before.token_ids[-1], self._tokenizer, settings, tools)
        except UnusablePrompt:
            raise
        except SettingError:  # the template changes earlier messages: all are tokenized again
            return None
        return ChatPrompt([*before.token_ids, *behind], messages, first, key)

    def _can_show_tools(self, settings: DataSettings) -> bool:
        if self._shows_tools is None:
            row = {"prompt": [{"role": "user", "content": "?"}]}
            texts = [prompt_tokens(row, self._tokenizer, settings, tools) for tools in (None, [_PROBE_TOOL])]
            self._shows_tools = texts[0] != texts[1]
        return self._shows_tools


def _conversation(key: bytes, messages: Sequence[Message]) -> bytes:
    """A digest of a conversation. The numbers of calls, which clients may drop, do not count."""
    return _digest(key, [essence(message) for message in messages])


def essence(message: Message) -> list[Any]:
    """What two forms of the same message have in common, however a client writes it."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    content = message["content"]
    return [message["role"], content if content.strip() or not calls else "", calls, message.get("name")]


def _digest(key: bytes, value: Any) -> bytes:
    return hashlib.sha256(key + json.dumps(value, sort_keys=True).encode()).digest()
