"""A chat model is known by its template and its stop tokens; a base model is not taken for one."""

from typing import Any

import pytest
from support.policies import character_tokenizer

from headrace.trainer.alarms.turn_tokens import turn_tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else m['content'] + '</s>' }}{% endfor %}"


def tokenizer_of(template: str | None) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>"]})
    tokenizer.chat_template = template
    return tokenizer


def ids(tokenizer: Any, *tokens: str) -> set[int]:
    return {*tokenizer.convert_tokens_to_ids([*tokens])}


def test_the_marks_of_a_chat_model_are_the_added_tokens_of_its_template():
    tokenizer = tokenizer_of(CHATML)
    end = ids(tokenizer, "<|im_end|>")
    assert turn_tokens(tokenizer, end) == ids(tokenizer, "<|im_start|>", "<|im_end|>")


def test_a_base_model_whose_tokenizer_comes_with_a_template_has_none():
    tokenizer = tokenizer_of(CHATML)
    assert turn_tokens(tokenizer, ids(tokenizer, "</s>")) == frozenset()


@pytest.mark.parametrize("template", [None, "", BRACKETS, "{{ raise_exception('no system message') }}", "{% for"])
def test_without_a_template_that_marks_turns_with_tokens_there_are_none(template: str | None):
    tokenizer = tokenizer_of(template)
    assert turn_tokens(tokenizer, ids(tokenizer, "</s>", "<|im_end|>")) == frozenset()
