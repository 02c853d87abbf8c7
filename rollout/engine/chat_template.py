"""Prompts, and what environments add to them, as tokens: text, or chat messages through the tokenizer's template."""

from collections.abc import Sequence
from typing import Any

from ...comm.errors import SettingError

_TURN = "\ue000turn\ue001"
"""Stands for the policy's newest turn in a rendered template: no tokenizer changes it, and no text has it."""


def prompt_tokens(row: dict[str, Any], tokenizer: Any, tools: Sequence[Any] | None = None) -> list[int]:
    """Token ids of the `prompt` of a data set's row: text as it is, chat messages through the tokenizer's template.

    tools: JSON schemas that the template shows to the policy.

    Raises `SettingError` for chat messages if the tokenizer has no template.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError(
            "data.path: the prompts are chat messages, but the tokenizer of model.path has no chat template"
        )
    return list(tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=False))


def tokens_behind_turn(
    prompt: Sequence[dict[str, Any]],
    turns: Sequence[dict[str, Any]],
    observation: Sequence[dict[str, Any]],
    last_token: int,
    tokenizer: Any,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Token ids that the template puts behind a turn of the policy: the turn's end, the observation, the head of the next turn.

    turns: the messages between the prompt and the newest turn, which itself is never rendered: its tokens stay those that were drawn.
    last_token: of that turn; if it is the turn's end, it is not repeated. Raises `SettingError` for a template that changes the
    prompt when messages follow.
    """

    def render(messages: list[dict[str, Any]], **form: Any) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **form)

    turn = {"role": "assistant", "content": _TURN}
    start, *rest = render([*prompt, *turns, turn, *observation], add_generation_prompt=True).split(_TURN)
    if len(rest) != 1 or not start.startswith(render(list(prompt))):
        raise SettingError("model.path: the chat template changes earlier messages when others follow")
    end = tokenizer.convert_ids_to_tokens(last_token) if last_token in tokenizer.added_tokens_decoder else ""
    return text_tokens(rest[0].removeprefix(end), tokenizer)


def text_tokens(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text that continues another one."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
