"""The prompts of rows in the form that the settings ask for."""

from typing import TYPE_CHECKING, Any

import msgspec

from .rows import DatasetRows

if TYPE_CHECKING:
    from ...comm.recipe import DataSettings


def in_form(rows: DatasetRows, settings: "DataSettings") -> DatasetRows:
    """The rows as the settings ask for them; those that need no change as they are."""
    return PromptRows(rows, settings) if settings.prompt_column != "prompt" or settings.is_chat else rows


class PromptRows:
    """The rows of a data set with their prompts in the column `prompt`, in the form that the settings ask for."""

    def __init__(self, rows: DatasetRows, settings: "DataSettings") -> None:
        self._rows = rows
        self._settings = settings

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> bytes:
        """A row; without a usable prompt it is as it was read, but never with another column's prompt."""
        raw = self._rows[index]
        settings = self._settings
        try:
            row = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return raw
        if not isinstance(row, dict):
            return raw
        if settings.prompt_column != "prompt":
            row.pop("prompt", None)
        if (prompt := row.get(settings.prompt_column)) is not None:
            row["prompt"] = _as_chat(prompt, settings.system_prompt) if settings.is_chat else prompt
        return msgspec.json.encode(row)


def _as_chat(prompt: Any, system_prompt: str) -> Any:
    """A text as a user message; the system prompt is put before messages that have none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (system_prompt and isinstance(messages, list)):
        return messages
    has_one = any(isinstance(message, dict) and message.get("role") == "system" for message in messages[:1])
    return messages if has_one else [{"role": "system", "content": system_prompt}, *messages]
