"""The chat template of `data.chat_template`: rollouts apply it to prompts, and the trainer exports it with the policy."""

from functools import cache
from pathlib import Path

from ...comm.errors import SettingError

_PATH_CHARACTERS = 1024


@cache
def own_template(setting: str) -> str:
    """The text of a template that is given as a file or as text; empty for the tokenizer's own. Raises `SettingError`."""
    if setting == "tokenizer" or not setting:
        return ""
    if "{" in setting or len(setting) > _PATH_CHARACTERS:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"data.chat_template: cannot read {setting}: {error}") from error
