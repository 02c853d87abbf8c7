"""A data set's row as the engine takes it: token ids of its prompt."""

from typing import Any

from ...comm.errors import SettingError


def prompt_tokens(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of a row's `prompt`: text as it is, chat messages through the tokenizer's template.

    Raises `SettingError` for chat messages where the tokenizer has no template.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError(
            "data.path: the prompts are chat messages, but the tokenizer of model.path has no chat template"
        )
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
