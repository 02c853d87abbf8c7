"""Prompts, and what environments add to them, as tokens: text, or chat messages through a template."""

from collections.abc import Sequence
from typing import Any

from ...comm.errors import SettingError, UnusablePrompt
from ...comm.recipe import DataSettings
from ...relay.dataset.chat_template import own_template

Messages = Sequence[dict[str, Any]]
_TURN = "\ue000turn\ue001"
"""Placeholder for the policy's newest turn in a rendered template: no tokenizer changes it, and it occurs in no text."""


def prompt_tokens(
    row: dict[str, Any], tokenizer: Any, settings: DataSettings, tools: Messages | None = None
) -> list[int]:
    """Token ids of the `prompt` of a data set's row: text as it is, chat messages through `data.chat_template` or the tokenizer's.

    tools: JSON schemas that the template shows to the policy. Raises `SettingError` for chat messages without a template, and
    `UnusablePrompt` if the template refuses them.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = _rendered(prompt, tokenizer, settings, tools, add_generation_prompt=True)
    return text_tokens(text, tokenizer)


def tokens_behind_turn(
    prompt: Messages,
    turns: Messages,
    observation: Messages,
    last_token: int,
    tokenizer: Any,
    settings: DataSettings,
    tools: Messages | None = None,
) -> list[int]:
    """Token ids that the template puts after a turn of the policy: the turn's end, the observation, the head of the next turn.

    turns: the messages between the prompt and the newest turn, which itself is never rendered: its tokens stay those that were drawn.
    last_token: of that turn; if it is the turn's end, it is not repeated. Raises `SettingError` for a template that changes the
    prompt when messages follow.
    """
    messages = [*prompt, *turns, {"role": "assistant", "content": _TURN}, *observation]
    start, *rest = _rendered(messages, tokenizer, settings, tools, add_generation_prompt=True).split(_TURN)
    if len(rest) != 1 or not start.startswith(_rendered(prompt, tokenizer, settings, tools)):
        raise SettingError("data.chat_template: the template changes earlier messages when others follow")
    end = tokenizer.convert_ids_to_tokens(last_token) if last_token in tokenizer.added_tokens_decoder else ""
    return text_tokens(rest[0].removeprefix(end), tokenizer)


def text_tokens(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text that is complete, or continues another one: without tokens around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(messages: Messages, tokenizer: Any, settings: DataSettings, tools: Messages | None, **form: bool) -> str:
    """The text of chat messages by the template."""
    template = own_template(settings.chat_template) or getattr(tokenizer, "chat_template", None)
    if not template:
        raise SettingError(
            "data.chat_template: the prompts are chat messages, or are made so by data.system_prompt or data.chat_template, but"
            " the tokenizer of model.path has no chat template; name a file with one, or its text"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=template,
            tokenize=False,
            **form,
            **(settings.chat_template_kwargs or {}),
        )
    except Exception as error:
        raise UnusablePrompt(
            f"data.chat_template: the template rejects a prompt: {type(error).__name__}: {error}"
        ) from error
