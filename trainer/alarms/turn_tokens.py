"""The tokens by which a chat model's own template marks turns: prompts without any of them are in another form than the model knows."""

from collections.abc import Collection
from typing import Any

_QUESTION = [{"role": "user", "content": "x"}]
_ANSWERED = [*_QUESTION, {"role": "assistant", "content": "x"}]


def turn_tokens(tokenizer: Any, stop_ids: Collection[int]) -> frozenset[int]:
    """The added tokens that the tokenizer's chat template puts into every prompt, such as `<|im_start|>` and `<|im_end|>`.

    stop_ids: the tokens with which the policy ends a response. If the template ends an answer with none of them, the policy is a base
    model, whose tokenizer may come with a template that it does not know: then the result is empty. It is empty too without a template, or
    where the template marks turns with text alone. Tokens that every text gets do not count.
    """
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    try:
        asked = _added(_QUESTION, tokenizer, add_generation_prompt=True)
        answered = _added(_ANSWERED, tokenizer)
    except Exception:  # noqa: BLE001 - a template may refuse these chats in its own way; then nothing is known of its turns
        return frozenset()
    return frozenset(asked) if answered.intersection(stop_ids) else frozenset()


def _added(messages: list[dict[str, str]], tokenizer: Any, **form: bool) -> set[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **form)
    ids = {*tokenizer(text, add_special_tokens=False)["input_ids"]}
    return (ids & tokenizer.added_tokens_decoder.keys()) - {*tokenizer("x")["input_ids"]}
