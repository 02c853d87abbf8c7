"""A row of the data set as the tokens of its prompt: text, or chat messages through a template."""

from functools import cache
from pathlib import Path
from typing import Any

from ...comm.errors import SettingError
from ...comm.recipe import DataSettings

_PATH_CHARACTERS = 1024


def prompt_tokens(row: dict[str, Any], tokenizer: Any, settings: DataSettings) -> list[int]:
    """Token ids of the `prompt` of a data set's row: text as it is, chat messages through `data.chat_template` or the tokenizer's.

    Raises `SettingError` for chat messages without a template, or if the template refuses them.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    template = _template(settings.chat_template) or getattr(tokenizer, "chat_template", None)
    if not template:
        raise SettingError(
            "data.path: the prompts are chat messages, but the tokenizer of model.path has no chat template;"
            " set data.chat_template"
        )
    try:
        return list(
            tokenizer.apply_chat_template(
                prompt,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=False,
                **(settings.chat_template_kwargs or {}),
            )
        )
    except Exception as error:
        raise SettingError(f"data.chat_template: it refuses a prompt: {type(error).__name__}: {error}") from error


@cache
def _template(setting: str) -> str:
    """The text of a template; empty for the tokenizer's own."""
    if setting == "tokenizer" or not setting:
        return ""
    if "{" in setting or len(setting) > _PATH_CHARACTERS:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"data.chat_template: cannot read {setting}: {error}") from error
