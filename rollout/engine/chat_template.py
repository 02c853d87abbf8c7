"""A row of the data set as the tokens of its prompt: text, or chat messages through the tokenizer's template."""

from typing import Any

from ...comm.errors import SettingError


def prompt_tokens(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of the `prompt` of a data set's row: text as it is, chat messages through the tokenizer's template.

    Raises `SettingError` for chat messages if the tokenizer has no template.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError(
            "data.path: the prompts are chat messages, but the tokenizer of model.path has no chat template"
        )
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
